"""Pipeline stages, and engines of several processes. Tensor parallelism is in `jpaged.models.sharding`."""
