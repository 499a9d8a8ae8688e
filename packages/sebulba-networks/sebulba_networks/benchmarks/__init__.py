"""``sebulba networks``: what congestion control has learned, beside what it is compared with."""
