"""LoRA adapters, as a user names them."""

from jpaged.lora.request import LoRARequest

__all__ = ["LoRARequest"]
