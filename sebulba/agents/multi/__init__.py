"""Agents for environments of many agents."""
