"""Metrics: what is counted, timed, written and drawn."""
