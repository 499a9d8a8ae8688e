"""Helpers that know nothing of reinforcement learning: files, checks, trust, trees."""
