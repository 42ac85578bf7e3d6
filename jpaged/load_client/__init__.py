"""Load client of `jpaged bench serve`: sends a workload to a server and measures its answers.

1. `arrivals` decides when each request is sent.
2. `run` sends them, at most `max_concurrency` at a time, over the connections of `connection`.
3. `backends` writes a request's body and reads the answer's events into an `Answer`.
4. `metrics` turns the answers into the metrics and the table of `vllm bench serve`; `plots` draws them.

It imports no engine and no JAX: server and client often share one machine.
"""
