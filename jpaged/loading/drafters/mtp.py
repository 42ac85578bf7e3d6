"""Reads MTP layers (multi-token prediction), which are in the checkpoint of the model itself.

Only the first MTP layer is read, and it runs for every draft. vLLM does the same.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import TensorSource, is_converted, read_json
from jpaged.loading.drafters.head_weights import declared_shapes, head_shapes, load_head, plan_head, random_head
from jpaged.loading.drafters.stored_drafter import StoredDrafter, Target
from jpaged.loading.hub import CONFIG, find_config, find_model, is_gguf
from jpaged.loading.quantized.config import method_of, with_quantization
from jpaged.loading.renamed_tensors import (
    MTPFormat,
    RenamedTensors,
    format_of_names,
    format_of_type,
    mtp_tensors,
)
from jpaged.loading.source import open_source
from jpaged.loading.weights import HEAD, WeightPlan, equal_bytes
from jpaged.models.draft_head import HeadKind, HeadSpec
from jpaged.models.families import family_of
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.families.wrappers import text_config
from jpaged.models.spec import DecoderSpec

logger = logging.getLogger(__name__)

METHOD = "speculative_config.method"
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # keys of config.json: number of MTP layers
ALWAYS = ("qwen3_next",)  # families that have an MTP layer, and no key for it
EMBED = "model.embed_tokens.weight"
OTHER = "use method ngram, suffix or draft_model"


@contextlib.contextmanager
def open_mtp(target: Target, config: EngineConfig, *, declared: bool = False) -> Iterator[StoredDrafter]:
    """Open and check the first MTP layer of `config.model`. declared: a config.json without weights is enough.

    Raises ModelLoadError if the checkpoint has no MTP layer.
    """
    has_weights = config.load_format != "dummy"
    if has_weights and not declared:
        folder = find_model(config.model, config.revision, config.download_dir)
    else:
        path = find_config(config.model, config.revision, config.download_dir)
        folder = path.parent if path.name == CONFIG else path
        has_weights = has_weights and folder.is_dir() and any(folder.glob("*.safetensors"))
    for is_other, kind in ((is_gguf(folder), "a GGUF file"), (is_converted(folder), "a folder of jpaged convert")):
        if is_other:
            raise ModelLoadError(
                f"{METHOD}='mtp': {folder} is {kind}, from which jpaged reads no MTP layers: use the model's folder of "
                f"safetensors files, or {OTHER}"
            )
    name = f"MTP layer of {config.model}"
    if not has_weights:
        values = with_quantization(folder, read_json(folder / CONFIG, required=True) | dict(config.hf_overrides or {}))
        values = text_config(values)
        family, reader = family_of(values), CheckpointConfig(values)
        if not reader.integer(*COUNTS, default=int(family.model_type in ALWAYS), minimum=0):
            raise _no_layer(folder, f"{CONFIG} has no {' or '.join(COUNTS)}", values)
        form = _checked(format_of_type(family.model_type), reader)
        spec = _head_spec(family.spec(reader), form, own_embed=False, own_head=target.num_devices > 1)
        load = functools.partial(random_head, spec, target.dtype)
        shapes = functools.partial(declared_shapes, spec, target.dtype)
        yield StoredDrafter(name, None, spec, load, shapes, target.spec.max_position)
        return
    with open_source(folder, config.hf_overrides or {}) as (values, source):
        family, reader = family_of(values), CheckpointConfig(values)
        whole = dataclasses.replace(family.spec(reader), tie_embeddings=target.spec.tie_embeddings)
        form = format_of_names(source.names, whole.num_layers)
        if form is None:
            raise _no_layer(folder, f"no tensor is of layer {whole.num_layers}, or named mtp.*", values)
        _checked(form, reader)
        rest = len(mtp_tensors(source.names, whole.num_layers))
        tensors = _tensors(form, family, source, whole.num_layers)
        if (unread := rest - len(list(tensors.names))) > 0:
            logger.info("%s: only the first MTP layer is used; %d tensors are not read", folder, unread)
        own = {key: _differs(tensors, source, key) for key in (EMBED, HEAD)}
        own[HEAD] |= target.num_devices > 1  # each device needs the whole matrix
        spec = _head_spec(whole, form, own_embed=own[EMBED], own_head=own[HEAD])
        tensors = _tensors(form, family, source, whole.num_layers, own)
        plan = plan_head(_with_rules(family, form), spec, values, tensors)
        load = functools.partial(load_head, plan, tensors, target.dtype, None)
        shapes = functools.partial(head_shapes, plan, target.dtype, None)
        packed = method_of(values) if any(leaf.packed for leaf in plan.leaves) else None
        yield StoredDrafter(name, None, spec, load, shapes, target.spec.max_position, packed)


def plan_new_layer(
    spec: HeadSpec, family: Family, values: Mapping[str, Any], source: TensorSource, num_layers: int
) -> tuple[WeightPlan, RenamedTensors] | None:
    """Plan the first MTP layer among new weights of a running model; None: they have none.

    spec: of the layer that the engine uses. If it uses the model's embedding or output matrix, copies of them are not
    read. Raises ModelLoadError as `plan_head`.
    """
    form = format_of_names(source.names, num_layers)
    if form is None:
        return None
    tensors = _tensors(form, family, source, num_layers, {EMBED: spec.own_embed, HEAD: spec.own_head})
    return plan_head(_with_rules(family, form), spec, values, tensors), tensors


def _tensors(
    form: MTPFormat, family: Family, source: TensorSource, num_layers: int,
    own: Mapping[str, bool] = MappingProxyType({}),
) -> RenamedTensors:  # fmt: skip
    """The first MTP layer's tensors.

    own: matrices that are read only if True, because the model has copies of them. A layer with an output matrix of its
    own whose tensors have none gets a copy of the model's.
    """
    prefixes = form.prefixes(num_layers)
    shared = {name.removesuffix("weight") for name, is_own in own.items() if not is_own}
    without = (*(old for old, new in prefixes if new in shared), *form.hidden_prefixes(num_layers))
    tensors = RenamedTensors(source, prefixes, without)
    if not own.get(HEAD) or HEAD in tensors:
        return tensors
    name = next((name for name in head_names(family) if name in source), HEAD)
    return RenamedTensors(source, (*prefixes, (name.removesuffix("weight"), HEAD.removesuffix("weight"))), without)


def head_names(family: Family) -> tuple[str, ...]:
    """Names that the output matrix of a model may have: its own, or the embedding's."""
    embeds = (name for rule in family.rules if rule.leaf == "embed" for name in (rule.name, *rule.aliases))
    return (HEAD, *embeds)


def _with_rules(family: Family, form: MTPFormat) -> Family:
    """The family with the format's rules, which replace its own for the same leaves."""
    leaves = {rule.leaf for rule in form.rules}
    return dataclasses.replace(family, rules=(*(r for r in family.rules if r.leaf not in leaves), *form.rules))


def _checked(form: MTPFormat, reader: CheckpointConfig) -> MTPFormat:
    """The format. Raises ModelLoadError if the config has an option of it that jpaged does not support."""
    for key, supported in form.refused:
        reader.refuse(key, supported)
    return form


def _head_spec(whole: DecoderSpec, form: MTPFormat, *, own_embed: bool, own_head: bool) -> HeadSpec:
    """The head with a layer of the model's kind: with full attention, and with experts if the model has some."""
    experts = None if form.dense or whole.experts is None else dataclasses.replace(whole.experts, layers=(True,))
    indexer = whole.indexer and dataclasses.replace(whole.indexer, layers=())
    latent = whole.latent and dataclasses.replace(whole.latent, indexer=indexer)
    rotates = any(whole.layer_rope(i) is not None for i in range(whole.num_layers))
    layer = dataclasses.replace(
        whole, num_layers=1, experts=experts, latent=latent, sliding_window=(), recurrence=None, attention_layers=(),
        lone_feed_forward=(), rope_layers=() if rotates else (False,),
    )  # fmt: skip
    return HeadSpec(
        HeadKind.MTP, layer, whole.hidden_size, norm_output=form.norm_output, own_embed=own_embed, own_head=own_head,
        own_norm=form.own_norm,
    )  # fmt: skip


def _differs(tensors: RenamedTensors, source: TensorSource, name: str) -> bool:
    """True if the MTP layer has the matrix `name` and it is not the model's. DeepSeek-V3's are copies."""
    if name not in tensors:
        return False
    if name not in source or tensors.quantized_shape(name) or source.quantized_shape(name):
        return True
    copy, original = tensors.entry(name), source.entry(name)
    if (copy.dtype, copy.shape) != (original.dtype, original.shape):
        return True
    same = equal_bytes(tensors.array(name), source.array(name))
    tensors.release(name)
    source.release(name)
    return not same


def _no_layer(folder: Path, why: str, values: Mapping[str, Any]) -> ModelLoadError:
    kind = ", ".join(values.get("architectures") or [str(values.get("model_type"))])
    return ModelLoadError(f"{METHOD}='mtp': {folder} ({kind}) has no MTP layer: {why}: {OTHER}")
