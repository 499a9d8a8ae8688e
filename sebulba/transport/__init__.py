"""Transport: networks to the Inferencers, trajectories to the learner; what a cluster replaces."""
