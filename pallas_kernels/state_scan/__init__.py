"""state_scan: a linear recurrence over the tokens of ragged rows, with one matrix of state for each row and head.

`gated_delta` and `mamba2` are its public forms: they check their arguments and call `state_scan`.
"""


from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.platforms import (
    Implementation,
    compiled_on,
    default_device,
    pick,
    takes_native,
    traced_platform,
)
from pallas_kernels.state_scan import cpu, mosaic_tpu, reference, triton, xla
from pallas_kernels.state_scan.call import ScanCall

# An implementation takes a ScanCall and returns (out, states). Its `refuse` takes (device, call).
IMPLEMENTATIONS = {
    "reference": Implementation(reference.state_scan),
    "xla": Implementation(xla.state_scan),
    "cpu": Implementation(cpu.state_scan, cpu.refuse),
    "triton": Implementation(compiled_on("cuda", triton.state_scan), triton.refuse),
    "mosaic_tpu": Implementation(compiled_on("tpu", mosaic_tpu.state_scan), mosaic_tpu.refuse),
}


def state_scan(
    call: ScanCall, implementation: str | None = None
) -> tuple[Float[Array, "tokens heads v_dim"], Float[Array, "slots heads k_dim v_dim"]]:
    """Outputs of all tokens, and the states after the last token of each row.

    For each token t of a row, in order, and each head h (of q and k: head h // v_per_k), with S [k_dim, v_dim]:

        S = exp(decay[t]) * S  (each row of S by its own decay if there is one per channel)
        S = S + k[t] (outer) factor[t] * (v[t] - k[t] . S if is_delta else v[t])
        out[t] = scale * q[t] . S + skip * v[t]

    is_delta: the delta rule. q and k are divided by sqrt(sum of squares + 1e-6) first.
    decay:    logarithm, at most 0: one number for each head, or one for each row of S, [tokens, heads, k_dim].
    skip:     None: 0.
    slots:    the slot of each row's state. positions: of each row's first token; at 0, S starts as zeros.

    Row i has the tokens query_start_loc[i] to query_start_loc[i + 1] - 1. Rows without tokens write no state. Tokens
    from query_start_loc[-1] on are padding, with undefined results. Sums and states are float32. Results have v's
    dtype. In place if the states are donated. No two rows with tokens may share a slot.

    targets: the slot that each row's state is written to; outside the array: it is not written. None: its own slot.

    implementation: None: the best one for the platform that the call is lowered for.
    """
    if implementation is not None:
        return pick(IMPLEMENTATIONS, implementation, call)(call)
    platform = traced_platform()
    if platform == "cpu":
        kernels = {"cpu": cpu.state_scan} if takes_native(cpu.refuse, call) else {}
    else:
        name, target = {"gpu": ("triton", "cuda"), "tpu": ("mosaic_tpu", "tpu")}.get(platform, ("xla", ""))
        takes = name != "xla" and IMPLEMENTATIONS[name].refuse(default_device(), call) is None
        kernels = {target: IMPLEMENTATIONS[name].call} if takes else {}
    return lax.platform_dependent(call, **kernels, default=xla.state_scan) if kernels else xla.state_scan(call)
