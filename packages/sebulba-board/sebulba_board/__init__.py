"""``sebulba report`` and ``sebulba board``: runs as pages, in a file and in a browser."""
