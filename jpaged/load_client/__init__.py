"""Load client of `jpaged bench serve`: sends a workload to a server and measures its answers.

1. `arrivals` sets the time of each request.
2. `run` sends the requests, at most `max_concurrency` at a time, over HTTP connections (`connection`).
3. `backends` writes each request's body and reads the answer's events into an `Answer`.
4. `metrics` computes the metrics and the table of `vllm bench serve`. `plots` draws them.

It imports no engine and no JAX, because server and client often share one machine.
"""
