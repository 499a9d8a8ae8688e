"""Metrics: what is counted, timed, written and drawn.

Nothing here changes a run: what a writer raises is a warning.
"""
