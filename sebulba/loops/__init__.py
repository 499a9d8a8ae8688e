"""Loops: ``GymnasiumLoop``, the run that it starts and ends, evaluation, and the supervisor.

They put the rooms of the data together. A change of what becomes of a trajectory does not belong
here but to ``inference/``, ``transport/`` or ``learning/``.
"""
