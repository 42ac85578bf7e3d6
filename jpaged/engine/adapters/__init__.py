"""LoRA adapters on the host: which are known, which are in memory, and which are in the slots of the device."""
