"""Writes a quantised copy of a checkpoint, in the format of the library compressed-tensors."""

from jpaged.quantizing.checkpoint import METHODS, SCHEMES, quantize_checkpoint

__all__ = ["METHODS", "SCHEMES", "quantize_checkpoint"]
