"""Loads drafters: draft models, EAGLE-3 heads and MTP layers. They are whole on every device of the model."""

from jpaged.loading.drafters.drafter import LoadedDrafter, describe_drafter, load_drafter

__all__ = ["LoadedDrafter", "describe_drafter", "load_drafter"]
