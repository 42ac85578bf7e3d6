"""Uploads the extras of rows: all extras when a row starts, and its mask whenever the mask changes."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from jpaged.engine.step_plan import RowExtras, RowInit, RowMask
from jpaged.params.sampling import MAX_LOGIT_BIAS
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import DeviceState, SamplingState
from jpaged.runtime.store.stored_programs import ProgramStore, compile_program

MASKS_AT_ONCE = 8


class ExtrasUploader:
    """Two programs: one sets all extras of a row, one sets masks of up to MASKS_AT_ONCE rows. Both update in place."""

    def __init__(
        self, state: DeviceState, max_model_len: int, placement: Placement, store: ProgramStore | None = None
    ):
        """Compile the programs. state: arrays or ShapeDtypeStructs. store: see `compile_program`.

        max_model_len: maximum tokens that penalties count.
        """
        self._placement = placement
        self._max_tokens = max_model_len
        self._words = state.sampling.masks.shape[1]
        self._custom = state.sampling.custom.shape[1]
        self._padding = state.sampling.counts.shape[1]  # an id past the vocabulary
        size = 3 + max_model_len + 2 * MAX_LOGIT_BIAS + self._words + self._custom

        def compiled(call: functools.partial[SamplingState], *arguments: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
            return compile_program(call, (state.sampling, *arguments), donate=(0,), store=store)

        start = functools.partial(_start_row, max_tokens=max_model_len)
        self._start = compiled(start, placement.shape((size,), np.int32))
        rows = placement.shape((MASKS_AT_ONCE,), np.int32)
        masks = placement.shape((MASKS_AT_ONCE, self._words), np.uint32)
        self._set_masks = compiled(functools.partial(_set_masks), rows, masks)

    def start(self, state: DeviceState, init: RowInit) -> DeviceState:
        """Set all extras of a row that starts. Donates the extras of `state`."""
        extras = init.extras or RowExtras()
        tokens = np.full(self._max_tokens, self._padding, np.int32)
        bias_ids = np.full(MAX_LOGIT_BIAS, self._padding, np.int32)
        bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
        mask, custom = np.zeros(self._words, np.uint32), np.zeros(self._custom, np.float32)
        head = np.array([init.row, extras.prompt_len, 0], np.int32)
        if extras.token_ids is not None:
            tokens[: len(extras.token_ids)] = extras.token_ids
        if extras.bias_ids is not None and extras.bias is not None:
            bias_ids[: len(extras.bias_ids)] = extras.bias_ids
            bias[: len(extras.bias)] = extras.bias
        if extras.mask is not None:
            mask[:] = extras.mask
        if extras.custom is not None:
            custom[:] = extras.custom
        parts = (head, tokens, bias_ids, bias.view(np.int32), mask.view(np.int32), custom.view(np.int32))
        packed = self._placement.put(np.concatenate(parts))
        return state.replace(sampling=self._start(state.sampling, packed))

    def set_masks(self, state: DeviceState, masks: Sequence[RowMask]) -> DeviceState:
        """Set masks of rows. Donates the extras of `state`."""
        sampling: SamplingState = state.sampling
        for first in range(0, len(masks), MASKS_AT_ONCE):
            part = masks[first : first + MASKS_AT_ONCE]
            rows = np.full(MASKS_AT_ONCE, len(sampling.masks), np.int32)
            words = np.zeros((MASKS_AT_ONCE, self._words), np.uint32)
            for i, mask in enumerate(part):
                rows[i], words[i] = mask.row, mask.words
            sampling = self._set_masks(sampling, self._placement.put(rows), self._placement.put(words))
        return state.replace(sampling=sampling)


def _start_row(state: SamplingState, packed: Int[Array, " packed"], *, max_tokens: int) -> SamplingState:
    words, custom = state.masks.shape[1], state.custom.shape[1]
    cuts = np.cumsum([3, max_tokens, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, words, custom])[:-1]
    head, tokens, bias_ids, bias, mask, parameters = jnp.split(packed, cuts)
    row, prompt_len = head[0], head[1]
    in_prompt = jnp.arange(max_tokens) < prompt_len
    counts = jnp.zeros(state.counts.shape[1], jnp.int32)
    counts = counts.at[tokens].add(jnp.where(in_prompt, 0, 2), mode="drop")
    counts = counts.at[tokens].max(counts[tokens] | in_prompt, mode="drop")
    return SamplingState(
        counts=state.counts.at[row].set(counts),
        masks=state.masks.at[row].set(jax.lax.bitcast_convert_type(mask, jnp.uint32)),
        bias_ids=state.bias_ids.at[row].set(bias_ids),
        bias=state.bias.at[row].set(jax.lax.bitcast_convert_type(bias, jnp.float32)),
        custom=state.custom.at[row].set(jax.lax.bitcast_convert_type(parameters, jnp.float32)),
    )


def _set_masks(
    state: SamplingState, rows: Int[Array, " masks"], words: UInt[Array, "masks words"]
) -> SamplingState:
    return state.replace(masks=state.masks.at[rows].set(words, mode="drop"))
