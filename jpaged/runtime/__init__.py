"""The device side: the step, its state and its programs. Everything in here uses jax."""
