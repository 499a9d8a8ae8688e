"""Tools that look at runs, environments and agents, and change nothing in them."""
