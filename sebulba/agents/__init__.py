"""The algorithms, one file each, and their networks.

Import from the modules: :mod:`sebulba.agents.configs` must stay importable without JAX.
"""
