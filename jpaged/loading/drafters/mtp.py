"""Reads MTP layers (multi-token prediction), which are in the checkpoint of the model itself.

Only the first MTP layer is read, and it runs for every draft. vLLM does the same.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import TensorSource, is_converted, read_json
from jpaged.loading.drafters.head_weights import declared_shapes, head_shapes, load_head, plan_head, random_head
from jpaged.loading.drafters.stored_drafter import StoredDrafter, Target
from jpaged.loading.hub import CONFIG, find_config, find_model, is_gguf
from jpaged.loading.quantized.config import method_of, with_quantization
from jpaged.loading.renamed_tensors import RenamedTensors, mtp_prefixes, mtp_tensors
from jpaged.loading.source import open_source
from jpaged.loading.weights import HEAD, WeightPlan, equal_bytes
from jpaged.models.draft_head import HeadKind, HeadSpec
from jpaged.models.families import family_of
from jpaged.models.families.base import Family
from jpaged.models.families.config import CheckpointConfig
from jpaged.models.spec import DecoderSpec

logger = logging.getLogger(__name__)

METHOD = "speculative_config.method"
COUNT = "num_nextn_predict_layers"  # key of config.json: number of MTP layers
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
        if not CheckpointConfig(values).integer(COUNT, default=0, minimum=0):
            raise _no_layer(folder, f"{CONFIG} has no {COUNT}", values)
        spec = _head_spec(family_of(values).spec(CheckpointConfig(values)), own_embed=False, own_head=False)
        load = functools.partial(random_head, spec, target.dtype)
        shapes = functools.partial(declared_shapes, spec, target.dtype)
        yield StoredDrafter(name, None, spec, load, shapes, target.spec.max_position)
        return
    with open_source(folder, config.hf_overrides or {}) as (values, source):
        family, reader = family_of(values), CheckpointConfig(values)
        whole = dataclasses.replace(family.spec(reader), tie_embeddings=target.spec.tie_embeddings)
        prefixes = mtp_prefixes(source.names, whole.num_layers)
        if prefixes is None:
            raise _no_layer(folder, f"no tensor is of layer {whole.num_layers}, or named mtp.*", values)
        rest = len(mtp_tensors(source.names, whole.num_layers))
        tensors = RenamedTensors(source, prefixes)
        if (unread := rest - len(list(tensors.names))) > 0:
            logger.info("%s: only the first MTP layer is used; %d tensors of others are not read", folder, unread)
        own = {key: _differs(tensors, source, key) for key in (EMBED, HEAD)}
        own[HEAD] |= HEAD in tensors and target.num_devices > 1  # each device needs the whole matrix
        spec = _head_spec(
            whole, own_embed=own[EMBED], own_head=own[HEAD], norm_output=any(old == "mtp.fc." for old, _ in prefixes)
        )
        shared = {name.removesuffix("weight") for name, is_own in own.items() if not is_own}
        tensors = RenamedTensors(source, prefixes, without=tuple(old for old, new in prefixes if new in shared))
        plan = plan_head(family, spec, values, tensors)
        load = functools.partial(load_head, plan, tensors, target.dtype, None)
        shapes = functools.partial(head_shapes, plan, target.dtype, None)
        form = method_of(values) if any(leaf.packed for leaf in plan.leaves) else None
        yield StoredDrafter(name, None, spec, load, shapes, target.spec.max_position, form)


def plan_new_layer(
    spec: HeadSpec, family: Family, values: Mapping[str, Any], source: TensorSource, num_layers: int
) -> tuple[WeightPlan, RenamedTensors] | None:
    """Plan the first MTP layer among new weights of a running model; None: they have none.

    spec: of the layer that the engine uses. If it uses the model's embedding or output matrix, copies of them are not
    read. Raises ModelLoadError as `plan_head`.
    """
    prefixes = mtp_prefixes(source.names, num_layers)
    if prefixes is None:
        return None
    own = {EMBED: spec.own_embed, HEAD: spec.own_head}
    shared = {name.removesuffix("weight") for name, is_own in own.items() if not is_own}
    tensors = RenamedTensors(source, prefixes, without=tuple(old for old, new in prefixes if new in shared))
    return plan_head(family, spec, values, tensors), tensors


def _head_spec(whole: DecoderSpec, *, own_embed: bool, own_head: bool, norm_output: bool = False) -> HeadSpec:
    """The head with a layer of the model's kind: with experts if the model has some, and with full attention."""
    experts = whole.experts and dataclasses.replace(whole.experts, layers=(True,))
    indexer = whole.indexer and dataclasses.replace(whole.indexer, layers=())
    latent = whole.latent and dataclasses.replace(whole.latent, indexer=indexer)
    layer = dataclasses.replace(
        whole, num_layers=1, experts=experts, latent=latent, sliding_window=(), rope_layers=()
    )
    return HeadSpec(
        HeadKind.MTP, layer, whole.hidden_size, norm_output=norm_output, own_embed=own_embed, own_head=own_head
    )


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
