"""The device side: the step, its state, its programs. Everything here touches jax."""
