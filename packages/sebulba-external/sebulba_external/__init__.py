"""Environments that drive themselves: clients ask the trainer for actions at their own pace.

``sebulba_external.seats`` is the trainer's side, ``sebulba_external.client`` the other one, which
imports NumPy and msgpack alone.
"""
