"""`StoredDrafter`: a drafter that is checked but not on the device. `Target`: the model that it drafts for."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.errors import ModelLoadError
from jpaged.models.draft_head import HeadSpec
from jpaged.models.quantization import LeafPlacer
from jpaged.models.spec import DecoderSpec, Params

MODEL = "speculative_config.model"


@dataclasses.dataclass(frozen=True)
class Target:
    """The model that a drafter is for."""

    spec: DecoderSpec        # may be split (`split_spec`): only sizes that a split keeps are read
    dtype: np.dtype          # of its weights and hidden states; the drafter gets it, too
    tokenizer: Any | None    # transformers.PreTrainedTokenizerBase; None: there is none, or it is not read
    num_devices: int = 1     # that its matrices are split over
    checks_tokens: bool = True  # False: the tokenizers are not compared (`jpaged plan`)


@dataclasses.dataclass(frozen=True)
class StoredDrafter:
    """A drafter whose files are open and checked. Exactly one of the specs is set."""

    name: str             # folder or hub id, for logs and tables
    draft_spec: DecoderSpec | None
    head_spec: HeadSpec | None
    # load(placer), shapes(placer): the weights on the devices, or as ShapeDtypeStructs
    load: Callable[[LeafPlacer], Params]
    shapes: Callable[[LeafPlacer], Params]
    max_model_len: int    # longest request that the drafter supports, in tokens
    format: str | None = None  # of weights that are quantised in the checkpoint


def check_hidden_size(folder: Path | str, found: int, target: DecoderSpec, key: str) -> None:
    """Raise ModelLoadError if a head was trained for another hidden size."""
    if found != target.hidden_size:
        raise ModelLoadError(
            f"{MODEL}: {folder} is a head for hidden states of {found:,} numbers ({key}), and the model's have "
            f"{target.hidden_size:,}: use a head that was trained for this model"
        )


def check_vocab_size(folder: Path | str, found: int, target: DecoderSpec) -> None:
    """Raise ModelLoadError if a head was trained for another vocabulary."""
    if found != target.vocab_size:
        raise ModelLoadError(
            f"{MODEL}: {folder} is a head for a vocabulary of {found:,} tokens, and the model's has "
            f"{target.vocab_size:,}: use a head that was trained for this model"
        )
