"""Simulates the engine: its real scheduler and KV manager, a simulated clock and a cost model. Imports no jax."""
