"""Commands: the command line, one file for each family of commands."""
