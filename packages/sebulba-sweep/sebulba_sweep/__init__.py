"""``sebulba sweep``: hyper-parameters that are searched by many trainings."""
