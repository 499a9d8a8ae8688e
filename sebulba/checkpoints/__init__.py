"""Checkpoints on disk: whole or not there, checked when they are read."""
