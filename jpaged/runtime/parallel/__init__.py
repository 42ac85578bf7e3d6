"""Pipeline stages, and processes that run one engine together. Tensor parallelism is in `jpaged.models.sharding`."""
