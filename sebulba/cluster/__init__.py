"""Parts of a run that are not in this process: Inferencers, a replay, other hosts that learn."""
