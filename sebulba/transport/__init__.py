"""Transport: networks travel to the Inferencers, trajectories to the learner.

A cluster replaces this room. Nothing here knows environments, agents' losses or files.
"""
