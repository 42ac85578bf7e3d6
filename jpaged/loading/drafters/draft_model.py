"""Reads draft models: any checkpoint that jpaged can serve, with the model's vocabulary."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.loading.drafters.stored_drafter import MODEL, StoredDrafter, Target
from jpaged.loading.hub import CONFIG, find_config
from jpaged.loading.model import check_quantization, find_weights, open_weights
from jpaged.loading.model_description import declared_weights, has_weights
from jpaged.loading.tokenizer import has_tokenizer, load_tokenizer
from jpaged.models.spec import DecoderSpec
from jpaged.speculation_config import SpeculationConfig


@contextlib.contextmanager
def open_draft_model(
    speculation: SpeculationConfig, target: Target, config: EngineConfig, *, declared: bool = False
) -> Iterator[StoredDrafter]:
    """Open and check the draft model. declared: a config.json without weights is enough.

    Raises ModelLoadError for a model that jpaged cannot run, or with another vocabulary.
    """
    name = speculation.model
    assert name is not None, "SpeculationConfig has checked it"
    of_draft = dataclasses.replace(
        config, model=name, tokenizer=None, revision=None, hf_overrides=None, quantization=speculation.quantization,
        speculative_config=None, runner="generate", load_format="dummy" if config.load_format == "dummy" else "auto",
    )  # fmt: skip
    if declared:
        path = find_config(name, None, config.download_dir)
        folder = path.parent if path.name == CONFIG else path
        if path.name == CONFIG or not has_weights(folder):
            spec, shapes, form = declared_weights(of_draft, folder)
            yield _stored(name, spec, target, speculation, None, lambda placer: shapes(target.dtype, placer), form)
            return
    else:
        folder = find_weights(of_draft)
    with open_weights(of_draft, folder) as (_, weights):
        check_quantization(of_draft, weights.format)
        _check_vocabulary(folder, weights.spec, target)
        yield _stored(
            name, weights.spec, target, speculation, lambda placer: weights.load(target.dtype, placer),
            lambda placer: weights.shapes(target.dtype, placer), weights.format,
        )  # fmt: skip


def _stored(
    name: str, spec: DecoderSpec, target: Target, speculation: SpeculationConfig, load: Any, shapes: Any,
    form: str | None,
) -> StoredDrafter:  # fmt: skip
    if spec.recurrence is not None:
        raise ModelLoadError(
            f"{MODEL}={name!r}: has recurrent layers, whose state cannot return to the last accepted draft yet: use a "
            "draft model with attention in all layers, or method 'ngram' or 'suffix'"
        )
    longest = min(spec.max_position, target.spec.max_position, speculation.max_model_len or spec.max_position)
    return StoredDrafter(name, spec, None, load, shapes, longest, form)


def _check_vocabulary(folder: Path, spec: DecoderSpec, target: Target) -> None:
    """Raise ModelLoadError unless the draft model has the token ids of the model.

    The rows of an embedding may be padded, so the sizes may differ. A folder without a tokenizer has the model's.
    """
    if not target.checks_tokens:
        return
    ours = target.tokenizer
    if ours is None:
        if spec.vocab_size != target.spec.vocab_size:
            raise ModelLoadError(
                f"{MODEL}: {folder} has a vocabulary of {spec.vocab_size:,} tokens, and the model's has "
                f"{target.spec.vocab_size:,}. Without a tokenizer (skip_tokenizer_init) they must be equal: use "
                "another draft model, or load the tokenizer"
            )
        return
    tokens = {number: token for token, number in ours.get_vocab().items()}
    if has_tokenizer(folder) and (tokenizer := load_tokenizer(folder)) is not None:
        theirs = {number: token for token, number in tokenizer.get_vocab().items()}
        last = min(max(tokens), max(theirs))
        wrong = [i for i in range(last + 1) if tokens.get(i) != theirs.get(i)]
        if wrong:
            first = wrong[0]
            raise ModelLoadError(
                f"{MODEL}: {folder} has another vocabulary than the model: {len(wrong):,} of the first {last + 1:,} "
                f"ids are different tokens. Id {first} is {theirs.get(first)!r}, and {tokens.get(first)!r} in the "
                f"model ({len(theirs):,} and {len(tokens):,} tokens): use a draft model of the same family"
            )
        tokens = {number: token for number, token in tokens.items() if number <= last}
    if max(tokens) >= spec.vocab_size:
        raise ModelLoadError(
            f"{MODEL}: {folder} has an embedding of {spec.vocab_size:,} rows, and the model's tokenizer has ids up to "
            f"{max(tokens):,}: use a draft model of the same family"
        )
