"""Reads LoRA adapters: from a PEFT folder, or from arrays with PEFT's names.

1. `config.py` reads adapter_config.json, and refuses everything but plain LoRA.
2. `names.py` pairs the tensors A and B of each module.
3. `modules.py` finds the leaf of the parameter tree that a module's weight fills, with the family's `TensorRule`s.
4. `matrices.py` writes the pairs into arrays with the layout of the adapter pools.
5. `reader.py` does these in order. Every tensor must be used, and has its shape checked before it is read.
"""

from jpaged.loading.adapters.reader import describe_adapter, read_adapter, read_arrays

__all__ = ["describe_adapter", "read_adapter", "read_arrays"]
