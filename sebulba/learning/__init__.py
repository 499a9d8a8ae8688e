"""Learning: the pmapped update and the loop that feeds it."""
