"""The state of an environment as bytes, for exact resume."""
