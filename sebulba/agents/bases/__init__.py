"""What families of agents share."""
