"""Learning: the update on all update devices.

Only the thread that runs this room launches updates.
"""
