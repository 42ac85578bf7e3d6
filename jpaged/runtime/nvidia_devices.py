"""Explains in one sentence why JAX does not use this machine's NVIDIA GPU, and what to change."""

import importlib.util
import pathlib
import re

from jpaged.errors import first_line

# NVIDIA's kernel driver writes its version here. Linux only.
VERSION_FILE = pathlib.Path("/proc/driver/nvidia/version")
# Oldest driver version for each plugin, from NVIDIA's CUDA toolkit release notes, "minor version compatibility".
OLDEST_DRIVER = {"jax_cuda13_plugin": 580, "jax_cuda12_plugin": 525}


def driver_version() -> str | None:
    """Version of the NVIDIA driver, "580.65.06"; None if there is no driver."""
    try:
        text = VERSION_FILE.read_text("utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def cannot_start(error: Exception) -> str:
    """Message for an error that JAX raised while starting a device. Some of these errors have no text."""
    reason = problem("cpu") or "set JAX_PLATFORMS to a platform that this machine has, or unset it"
    return f"JAX cannot start a device ({first_line(error)}): {reason}"


def installed_plugins() -> list[str]:
    """Installed JAX plugins for NVIDIA GPUs, newest first."""
    return [name for name in OLDEST_DRIVER if importlib.util.find_spec(name)]


def problem(platform: str) -> str | None:
    """Reason why JAX does not use this machine's NVIDIA GPU, or None. platform: of JAX's default device."""
    driver = driver_version()
    if platform != "cpu" or driver is None:
        return None
    plugins = installed_plugins()
    if not plugins:
        return "this machine has an NVIDIA card, but JAX's plugin for it is missing: pip install 'jax[cuda13]'"
    oldest, plugin = OLDEST_DRIVER[plugins[0]], plugins[0].removesuffix("_plugin").replace("jax_", "")
    if int(driver.split(".")[0]) < oldest:
        other = "" if plugins[0] == "jax_cuda12_plugin" else ", or install jax[cuda12]"
        return f"the NVIDIA driver {driver} is too old for {plugin}, which needs {oldest} or newer: update it{other}"
    return (
        "this machine has an NVIDIA card that JAX does not use. JAX says why with: "
        "python -c \"import jax; jax.devices('cuda')\""
    )
