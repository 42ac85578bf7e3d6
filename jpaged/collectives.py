"""Seconds of a collective between devices, from the bandwidth and the latency of their link."""

import dataclasses
import math

from jpaged.errors import RequestError


@dataclasses.dataclass(frozen=True)
class Link:
    """Connection of a device with the other devices of its group."""

    bandwidth: float  # bytes per second that a device sends, while it receives at the same rate
    latency: float    # seconds of a step, from sending a message until its first byte can be used

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            known = "must be a number of bytes per second that a device sends, above 0: 450e9 for NVLink 4"
            raise RequestError("link_bandwidth", self.bandwidth, known)
        if not 0 <= self.latency < math.inf:
            raise RequestError("link_latency", self.latency, "must be a number of seconds, from 0: 1.9e-6 for NVLink 4")

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:g} GB/s and {self.latency * 1e6:g} us a step"


def all_reduce_seconds(num_bytes: float, devices: int, link: Link) -> float:
    """Seconds to add an array of `num_bytes` bytes over N devices, with the faster of two algorithms.

    Ring: 2 (N - 1) steps, each with 1/N of the array (NCCL's ring, and its "bus bandwidth" in the PERFORMANCE.md of
    nccl-tests). One-shot: each device sends its whole array to all others at once (the kernels of TensorRT-LLM and
    vLLM for small arrays). One-shot needs a direct connection of all devices, such as an NVSwitch.
    """
    others = devices - 1
    ring = 2 * others / devices * num_bytes / link.bandwidth + 2 * others * link.latency
    one_shot = others * num_bytes / link.bandwidth + link.latency
    return min(ring, one_shot) if others else 0.0


def collective_seconds(kind: str, num_bytes: float, devices: int, link: Link) -> float:
    """Seconds of one of the operations in `COLLECTIVES` over N devices.

    num_bytes: size of one device's operand; for an all-gather, of the result. Reduce-scatter and all-gather are half
    the ring of an all-reduce. In an all-to-all, a device sends 1/N of its operand to each other device, all at once.
    """
    if kind == "all-reduce":
        return all_reduce_seconds(num_bytes, devices, link)
    if devices == 1:
        return 0.0
    steps = devices - 1 if kind in ("all-gather", "reduce-scatter") else 1
    share = 1.0 if kind == "collective-permute" else (devices - 1) / devices
    return share * num_bytes / link.bandwidth + steps * link.latency


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")  # as XLA names them
