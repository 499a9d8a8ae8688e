"""Learn from episodes that were recorded: data sets, and agents that learn from them."""
