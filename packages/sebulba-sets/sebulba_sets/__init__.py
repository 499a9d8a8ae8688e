"""Sets of environments: which one an episode plays is drawn at each reset.

``sebulba_sets.structures`` says how likely each is, given the returns so far.
"""
