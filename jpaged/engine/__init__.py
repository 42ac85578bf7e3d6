"""The host side. Imports no JAX.

`engine.Engine` is the loop. `input` makes requests, `scheduling` and `kv_cache` decide what a step runs, `strategies`
and `output` turn its results into answers, `grammar` restricts them, and `observe` shows all of it.
"""
