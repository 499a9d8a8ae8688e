"""Checkpoints: the store on disk, and what a run saves and resumes."""
