"""Quantises a checkpoint into another one, in the format of the library compressed-tensors."""

from jpaged.quantizing.checkpoint import METHODS, SCHEMES, quantize_checkpoint

__all__ = ["METHODS", "SCHEMES", "quantize_checkpoint"]
