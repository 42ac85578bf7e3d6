"""The simulator: the engine's own scheduler and KV manager with a simulated clock and a cost model. Imports no jax."""
