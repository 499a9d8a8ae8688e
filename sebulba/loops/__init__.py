"""Loops wire environments, runtime and agents together; ``GymnasiumLoop`` is the first."""
