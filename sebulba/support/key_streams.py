"""Numbers that are folded into a PRNG key to make keys for another purpose.

Splitting a key folds in 0, 1, 2 and so on, so these numbers stand at the other end. No two purposes
have the same number, and no other module defines one.
"""

UPDATE_STREAM = 0xFFFFFFFF
"""Of the seed: the keys of the updates. An agent state from the same seed has others."""

FRESH_STREAM = 0xFFFFFFFE
"""Of the seed: the keys of what is made anew during a run. That of the second generation would
otherwise be the step key of ``Agent.new_state``."""

POLICY_STREAM = 0xFFFFFFFD
"""Of the seed: the keys of a policy. Evaluations during training would otherwise share keys with an
agent state that was made from the same seed."""

DROPPED_STREAM = 0xFFFFFFFC
"""Of the seed: an experience in the place of one that is dropped."""

HOST_STREAM = 0xFFFFFFFB
"""Of the key of a state, and then the number of the host: step states of hosts after the first."""

FIRST_NOISE_STREAM = 0x6E6F6973
"""Of the key of a step state: the first noise where noise lasts longer than a step."""

LAYER_NOISE_STREAM = 0x6E6F6974
"""Of the key of a step state or of a loss: the noise of a network's layers."""
