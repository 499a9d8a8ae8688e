"""Trained policies: on disk and in use."""
