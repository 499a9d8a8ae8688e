"""A run on disk: its folder, how it is built, trained, signalled, resumed and summed up."""
