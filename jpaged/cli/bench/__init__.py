"""`jpaged bench`: one module for each benchmark, and the workloads that they share."""
