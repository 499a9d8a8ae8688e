"""``sebulba networks``: a policy of congestion control beside what it is compared with."""
