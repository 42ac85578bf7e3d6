"""The simulator: the engine's own scheduler and KV manager under a clock that a cost model drives. Imports no jax."""
