"""The host side: which requests run in a step, where their KV lies, and what comes out. Imports no jax."""
