"""Mathematics that agents share: pure functions, most of them on one stream ``[T]``."""
