"""Fake devices: objects with the fields that the choice of an implementation reads."""

import types


def device_like(platform, capability=None):
    """Return a device of a platform. capability: compute capability of a GPU."""
    device = types.SimpleNamespace(platform=platform, device_kind="a device")
    if capability:
        device.compute_capability = capability
    return device


def gpu(capability="9.0"):
    """Return a GPU of a compute capability."""
    return device_like("gpu", capability)
