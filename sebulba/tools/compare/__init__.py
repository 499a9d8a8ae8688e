"""Runs beside each other: ``sebulba runs``, ``sebulba plot`` and ``sebulba diff``."""
