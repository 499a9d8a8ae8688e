"""Transport: brings networks to the Inferencers and trajectories to the update loop."""
