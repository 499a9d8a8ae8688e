"""Policies to look at: environments that draw, films, and screens."""
