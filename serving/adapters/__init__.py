"""LoRA adapters that requests choose with `model`, and the routes that load and unload them."""
