"""Learning: the update on all update devices, and the loop that feeds it.

Only the thread that runs this room launches updates.
"""
