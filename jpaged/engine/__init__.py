"""The host side. Imports no JAX.

`engine.Engine` is the loop. `input` makes requests. `scheduling` and `kv_cache` plan a step. `strategies` and `output`
turn its results into answers. `grammar` restricts answers. `observe` reports the engine's state.
"""
