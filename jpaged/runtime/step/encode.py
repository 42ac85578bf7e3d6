"""The forward pass of an encoder's step: from the packed plan to the hidden states and the pooled vectors of its texts.

Called by: `compile_forward`, in place of `forward.forward`.
Owns: the order of work in a forward program of an encoder.
Never: reads or writes pages or the request table: a text is computed in one step, and keeps no state on the device.

`DeviceState.hidden` gets the hidden states of all slots, then one pooled vector for each row. Output programs find both
there, by their index, as they find a decoder's last hidden states.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jpaged.models.encoder import encode
from jpaged.models.spec import DecoderSpec, Params, WeightLayout
from jpaged.runtime.state import DeviceState
from jpaged.runtime.step.batch import ForwardShape


def forward_texts(
    params: Params,
    state: DeviceState,
    packed: Int[Array, " packed"],
    *,
    spec: DecoderSpec,
    layout: WeightLayout,
    shape: ForwardShape,
    gated_dot: str | None = None,
) -> tuple[DeviceState, Int[Array, ""]]:
    """Run the encoder over one plan. Donate `state`. Returns (state, number of tokens)."""
    part = {name: packed[cut] for name, cut in shape.cuts.items()}
    num_tokens, ids = part["num_tokens"], part["prompt_tokens"].reshape(shape.rows, shape.row_len)
    x, pooled = encode(
        spec, params, ids, num_tokens, part["type_1_from"], layout=layout, gated_dot=gated_dot
    )  # fmt: skip
    hidden = lax.dynamic_update_slice(state.hidden, x, (0, 0))
    hidden = lax.dynamic_update_slice(hidden, pooled, (shape.tokens, 0))
    padding = ((0, 0), (0, state.output_rows.shape[1] - shape.rows))
    output_rows = jnp.pad(part["output_rows"].reshape(2, shape.rows), padding, constant_values=-1)
    return state.replace(hidden=hidden, output_rows=output_rows), jnp.sum(num_tokens)
