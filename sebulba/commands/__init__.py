"""Commands: what the command line does around a run."""
