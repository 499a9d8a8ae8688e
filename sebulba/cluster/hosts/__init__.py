"""Hosts that learn together: one process on each, with ``jax.distributed`` between them.

Every host has its own Inferencers, environments and update devices; networks and optimizer state
are the same on all. What the hosts agree on each round is in ``rounds.py``, and who is still
there in ``watch.py``.
"""
