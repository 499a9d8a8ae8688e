"""What is wrong with this machine (``sebulba doctor``) or an environment (``check-env``)."""
