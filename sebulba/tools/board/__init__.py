"""Runs as pages for a browser: ``sebulba report`` and ``sebulba board``."""
