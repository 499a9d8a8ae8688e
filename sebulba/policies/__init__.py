"""Trained policies: on disk and in use, with neither loop nor environment."""
