"""Learning: the update, mapped over the update devices, and the loop that feeds it."""
