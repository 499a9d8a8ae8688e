"""Inference: Inferencer threads act and step environments, cycle by cycle.

What is called at every step is here: measure before and after a change (``sebulba bench
inference``). Nothing here updates networks.
"""
