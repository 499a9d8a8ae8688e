"""Trajectory managers: the replay of an agent outside of the update devices, in one or more parts.

A ``TrajectoryManager`` holds a part, in this process, in one of its own or in an actor of Ray; a
``ShardedReplay`` is all of them as the learner sees them.
"""
