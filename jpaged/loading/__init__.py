"""Loads models: from a folder, a hub id, a GGUF file or live arrays to weights on the device."""

from jpaged.loading.model import LoadedModel, checkpoint_fingerprint, load_model
from jpaged.loading.tokenizer import load_tokenizer, valid_token_mask

__all__ = ["LoadedModel", "checkpoint_fingerprint", "load_model", "load_tokenizer", "valid_token_mask"]
