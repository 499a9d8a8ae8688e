"""Ready experiments, typed; free of JAX."""
