"""Inferencers whose cycles run in other processes: on this machine, or in actors of Ray."""
