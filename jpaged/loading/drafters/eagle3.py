"""Reads EAGLE-3 heads: `LlamaForCausalLMEagle3` folders, and those of the speculators library.

The formats are those that vLLM, SGLang and ModelOpt read and write. Differences between them:

| Format      | Config of the layer      | Numbers of target layers                                           |
|-------------|--------------------------|--------------------------------------------------------------------|
| Eagle3      | config.json              | eagle_config: layer i's output. At the top: layer i's input (vLLM) |
| speculators | transformer_layer_config | at the top: layer i's input                                        |
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError, shown
from jpaged.loading.checkpoint import TensorSource, read_json
from jpaged.loading.drafters.head_weights import (
    D2T,
    T2D,
    declared_shapes,
    head_shapes,
    load_head,
    plan_head,
    random_head,
    read_d2t,
)
from jpaged.loading.drafters.stored_drafter import MODEL, StoredDrafter, Target, check_hidden_size, check_vocab_size
from jpaged.loading.hub import CONFIG, find_config, find_model
from jpaged.loading.quantized.config import method_of, with_quantization
from jpaged.loading.renamed_tensors import RenamedTensors, eagle3_prefixes
from jpaged.loading.source import open_tensors
from jpaged.loading.weights import HEAD, refuse_extra
from jpaged.models.draft_head import HeadKind, HeadSpec
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.llama import LLAMA
from jpaged.models.families.qwen3 import QWEN3
from jpaged.models.spec import DecoderSpec

ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "Eagle3Speculator",
    "Eagle3DraftModel",
)  # fmt: skip
LAYERS: dict[str, Family] = {"llama": LLAMA, "qwen3": QWEN3}  # by model_type of the layer
EMBED = "model.embed_tokens.weight"  # in `RenamedTensors`
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
# Options of `eagle_config` with the values that jpaged supports.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,), "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,), "parallel_draft_step": (0, 1),
}  # fmt: skip


@contextlib.contextmanager
def open_eagle3(name: str, target: Target, config: EngineConfig, *, declared: bool = False) -> Iterator[StoredDrafter]:
    """Open and check the head in the folder or hub id `name`. declared: a config.json without weights is enough.

    Raises ModelLoadError for a head that jpaged cannot run, or that is for another model.
    """
    has_weights = config.load_format != "dummy"
    if has_weights and not declared:
        folder = find_model(name, None, config.download_dir)
    else:
        path = find_config(name, None, config.download_dir)
        folder = path.parent if path.name == CONFIG else path
        has_weights = has_weights and any(folder.glob("*.safetensors"))
    if not folder.is_dir():
        raise ModelLoadError(f"{MODEL}: {folder} is a file: an EAGLE-3 head is a folder with {CONFIG} and safetensors")
    values = with_quantization(folder, read_json(folder / CONFIG, required=True))
    family, layer, options = _read_config(folder, values)
    if not has_weights:
        embeds = layer.hidden_size != target.spec.hidden_size
        parts = {EMBED, HEAD} if embeds else {HEAD}
        spec = _head_spec(folder, values, layer, options, target.spec, parts)
        load = functools.partial(random_head, spec, target.dtype)
        yield _stored(name, spec, target, load, functools.partial(declared_shapes, spec, target.dtype))
        return
    with open_tensors(folder, values) as source:
        tensors = RenamedTensors(source, eagle3_prefixes(source.names))
        parts = {name for name in (EMBED, HEAD) if name in tensors} | ({D2T} if D2T in source else set())
        spec = _head_spec(folder, values, layer, options, target.spec, parts)
        _check_unknown(source, tensors, spec, family)
        d2t, plan = read_d2t(source, spec), plan_head(family, spec, values, tensors)
        load = functools.partial(load_head, plan, tensors, target.dtype, d2t)
        shapes = functools.partial(head_shapes, plan, target.dtype, spec.draft_vocab_size)
        form = method_of(values) if any(leaf.packed for leaf in plan.leaves) else None
        yield _stored(name, spec, target, load, shapes, form)


def _stored(
    name: str, spec: HeadSpec, target: Target, load: Any, shapes: Any, form: str | None = None
) -> StoredDrafter:
    return StoredDrafter(name, None, spec, load, shapes, target.spec.max_position, form)


def _read_config(folder: Path, values: Mapping[str, Any]) -> tuple[Family, DecoderSpec, CheckpointConfig]:
    """Family and spec of a head's layer, and the options of the head."""
    kind = values.get("speculators_model_type")
    if kind is not None and kind != "eagle3":
        raise ModelLoadError(
            f"{MODEL}: {folder / CONFIG}: speculators_model_type={shown(kind)} is not supported by jpaged (only eagle3)"
        )
    named = values.get("architectures") or []
    if kind is None and not any(name in ARCHITECTURES for name in named):
        raise ModelLoadError(
            f"{MODEL}: {folder / CONFIG}: architectures={shown(named)} is not an EAGLE-3 head that jpaged supports; "
            f"supported: {', '.join(ARCHITECTURES)}. For a whole model, use method draft_model"
        )
    of_layer = values.get("transformer_layer_config") if kind is not None else values
    if not isinstance(of_layer, Mapping):
        raise ModelLoadError(f"{MODEL}: {folder / CONFIG}: transformer_layer_config must be an object")
    model_type = of_layer.get("model_type", "llama")
    if model_type not in LAYERS:
        raise ModelLoadError(
            f"{MODEL}: {folder / CONFIG}: model_type={shown(model_type)} of the head's layer is not supported by "
            f"jpaged; supported: {', '.join(LAYERS)}"
        )
    reader = CheckpointConfig({key: value for key, value in of_layer.items() if key != "architectures"})
    layer = LAYERS[model_type].spec(reader)
    if layer.num_layers != 1:
        raise ModelLoadError(
            f"{MODEL}: {folder / CONFIG}: num_hidden_layers={layer.num_layers}: jpaged supports heads of one layer: "
            "use another head"
        )
    at_top = {key: values[key] for key in _FLAGS if key in values}
    options = dict(values.get("eagle_config") or {}) | at_top
    for key, supported in _SUPPORTED.items():
        CheckpointConfig(options).refuse(key, *supported)
    if kind is not None:
        options = {"norm_before_residual": True} | options
    return LAYERS[model_type], layer, CheckpointConfig(options)


def _head_spec(
    folder: Path, values: Mapping[str, Any], layer: DecoderSpec, options: CheckpointConfig, target: DecoderSpec,
    parts: Set[str],
) -> HeadSpec:  # fmt: skip
    """The head, checked against its target. parts: those of EMBED, HEAD and D2T that the checkpoint has."""
    reader, hidden = CheckpointConfig(values), layer.hidden_size
    key = "target_hidden_size" if reader.get("target_hidden_size") is not None else "hidden_size"
    states = reader.integer("target_hidden_size", default=hidden)
    check_hidden_size(folder, states, target, key)
    check_vocab_size(folder, layer.vocab_size, target)
    if target.layer_kv:
        raise ModelLoadError(
            f"{MODEL}: {folder} is an EAGLE-3 head, and the model's layers have unlike keys and values, whose hidden "
            "states no head reads yet: use a draft model, or method 'ngram' or 'suffix'"
        )
    drafts = reader.integer("draft_vocab_size", default=layer.vocab_size)
    if EMBED not in parts and hidden != target.hidden_size:
        raise ModelLoadError(
            f"{MODEL}: {folder} has no embed_tokens.weight, and its layer is {hidden:,} wide where the model's "
            f"embedding is {target.hidden_size:,} wide: the checkpoint is incomplete"
        )
    can_share = drafts == layer.vocab_size and hidden == target.hidden_size
    own_head = HEAD in parts or not can_share  # if it is not in the checkpoint, it is missing
    shared = {} if own_head else {"logit_divisor": target.logit_divisor, "final_softcap": target.final_softcap}
    layer = dataclasses.replace(
        layer, max_position=target.max_position, tie_embeddings=target.tie_embeddings,
        logit_divisor=1 / reader.positive("logit_scale", 1.0),
    )  # fmt: skip
    return HeadSpec(
        HeadKind.EAGLE3, dataclasses.replace(layer, **shared), states,
        aux_layers=_aux_layers(folder, values, options, target.num_layers),
        draft_vocab_size=None if drafts == layer.vocab_size and D2T not in parts else drafts,
        norm_before_residual=options.flag("norm_before_residual"), norm_before_fc=options.flag("norm_before_fc"),
        fc_norm=options.flag("fc_norm"), norm_output=options.flag("norm_output"), own_embed=EMBED in parts,
        own_head=own_head,
    )  # fmt: skip


def _aux_layers(
    folder: Path, values: Mapping[str, Any], options: CheckpointConfig, num_layers: int
) -> tuple[int, ...]:
    """Layers whose input the head reads, ascending. By default 2, n // 2 and n - 3 of n layers, as in vLLM."""
    if not options.flag("use_aux_hidden_state", True):
        return ()
    ids, shift, source = values.get(AUX_LAYERS), 0, AUX_LAYERS
    if not ids:
        ids, shift, source = options.get(AUX_LAYERS), 1, f"eagle_config.{AUX_LAYERS}"
    if not ids:
        ids, shift, source = [2, num_layers // 2, num_layers - 3], 0, f"the default {AUX_LAYERS}"
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise ModelLoadError(f"{MODEL}: {folder / CONFIG}: {source}={shown(ids)} must be a list of layers")
    layers = tuple(sorted(each + shift for each in ids))
    if len(set(layers)) < len(layers) or not all(0 <= layer <= num_layers for layer in layers):
        raise ModelLoadError(
            f"{MODEL}: {folder / CONFIG}: {source}={ids} must be different layers of the model, which has "
            f"{num_layers}: use a head that was trained for this model"
        )
    return layers


def _check_unknown(source: TensorSource, tensors: RenamedTensors, spec: HeadSpec, family: Family) -> None:
    """Raise ModelLoadError for tensors that are no part of an EAGLE-3 head, and for a missing `d2t`."""
    known = {*tensors.originals, T2D, D2T}
    rest = [name for name in source.names if name not in known and not family.ignored.fullmatch(name)]
    refuse_extra(source, [name for name in rest if not name.startswith("verifier_")])  # of training
    if spec.draft_vocab_size is not None and D2T not in source:
        raise ModelLoadError(
            f"{source.folder}: tensor {D2T} is missing, which draft_vocab_size={spec.draft_vocab_size} calls for: the "
            "checkpoint is incomplete"
        )
