"""``sebulba bench``: measurements of a run of the user."""
