"""Checkpoints: the store on disk, and nothing else."""
