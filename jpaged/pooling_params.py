"""Import path of vLLM's users for `PoolingParams`. The class is in `jpaged.params`."""

from jpaged.params.pooling import PoolingParams

__all__ = ["PoolingParams"]
