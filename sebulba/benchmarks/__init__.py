"""Benchmarks: figures with the command, the configuration and the machine that made them."""
