"""Commands: the command line, the folder of a run, exit codes and signals, JAX's set-up.

``experiment.py`` builds what a configuration describes, for benchmarks too.
"""
