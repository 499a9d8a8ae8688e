"""Networks, from an observation to what an agent needs of it."""
