"""The host side: scheduling, KV cache bookkeeping, inputs and outputs of requests. Imports no jax."""
