"""Adapters of environments of many agents."""
