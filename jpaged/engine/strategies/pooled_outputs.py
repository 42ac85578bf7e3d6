"""Turns a prompt's pooled vectors into embeddings or class probabilities, in float32 on the host.

Prompts are handled one at a time, so that a result does not depend on other requests of the step.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import numpy as np

from jpaged.errors import ModelLoadError, RequestError
from jpaged.outputs import ClassificationOutput, EmbeddingOutput, TokenPoolingOutput
from jpaged.params.pooling import PER_TOKEN, PairFormat, PooledModel, PoolingParams
from jpaged.params.sampling import SamplingParams
from jpaged.params.scoring import ScoringParams

Pooled = EmbeddingOutput | ClassificationOutput | TokenPoolingOutput


class Activation(enum.Enum):
    """Function that turns a classifier's scores into probabilities."""

    SOFTMAX = "softmax"  # over all labels, which exclude each other
    SIGMOID = "sigmoid"  # of each label by itself
    NONE = "none"        # a regression: the scores are the answer


_BY_PROBLEM_TYPE = {
    "single_label_classification": Activation.SOFTMAX,
    "multi_label_classification": Activation.SIGMOID,
    "regression": Activation.NONE,
}


# Names in a cross-encoder's config.json, as Sentence Transformers writes them
_BY_MODULE = {
    "torch.nn.modules.linear.Identity": Activation.NONE,
    "torch.nn.modules.activation.Sigmoid": Activation.SIGMOID,
    "torch.nn.modules.activation.Softmax": Activation.SOFTMAX,
}


def activation_of(config: Mapping[str, Any], num_labels: int) -> Activation:
    """The activation of a classifier's config.json.

    A cross-encoder of Sentence Transformers names it. Otherwise as Transformers' text-classification pipeline chooses.
    """
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        if named not in _BY_MODULE:
            known = ", ".join(_BY_MODULE)
            raise ModelLoadError(f"config.json: activation_fn={named!r} is not supported by jpaged; supported: {known}")
        return _BY_MODULE[named]
    problem = config.get("problem_type")
    if problem is None:
        return Activation.SIGMOID if num_labels == 1 else Activation.SOFTMAX
    if problem not in _BY_PROBLEM_TYPE:
        known = ", ".join(_BY_PROBLEM_TYPE)
        raise ModelLoadError(f"config.json: problem_type={problem!r} is not supported by jpaged; supported: {known}")
    return _BY_PROBLEM_TYPE[problem]


def labels_of(config: Mapping[str, Any], num_labels: int) -> tuple[str, ...]:
    """The names of a classifier's labels in config.json; Transformers' default for labels without a name."""
    names = config.get("id2label") or {}
    return tuple(str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(num_labels))


@dataclasses.dataclass(frozen=True, slots=True)
class Pooling:
    """Output of a pooling engine."""

    size: int                            # of the hidden state, or number of labels
    activation: Activation | None = None  # None: the engine embeds
    labels: tuple[str, ...] = ()          # names of the labels
    # Of Sentence Transformers: texts that can be put before a text, by name, and the name of the default; None: none
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None
    is_encoder: bool = False
    token_types: int = 0                  # of an encoder: see `models.spec.Encoder`
    pairs: PairFormat = PairFormat.JOINED # see `PooledModel`

    @property
    def task(self) -> str:
        """Name of the engine's task."""
        return "embed" if self.activation is None else "classify"

    @property
    def model(self) -> PooledModel:
        """Task, size and labels, for the callers of the engine."""
        return PooledModel(self.task, self.size, self.labels, self.pairs)

    def check(self, params: PoolingParams) -> None:
        """Raise RequestError for parameters that this engine does not support."""
        task = params.task and params.task.removeprefix(PER_TOKEN)
        if self.is_encoder and self.activation is not None and params.per_token:
            raise RequestError("task", params.task, "the model's score matrix is for whole texts: call classify()")
        if task == "classify" and self.activation is None:
            accepted = "the model has no score matrix: call embed(), or load a ...ForSequenceClassification checkpoint"
            raise RequestError("task", params.task, accepted)
        if task == "embed" and self.activation is not None:
            raise RequestError("task", params.task, "the model is a sequence classifier: call classify()")
        if self.activation is None:
            if not params.activation and params.use_activation is None:
                raise RequestError("activation", params.activation, "is for classifiers: leave it out")
            if params.dimensions is not None and params.dimensions > self.size:
                raise RequestError("dimensions", params.dimensions, f"the model's embeddings have {self.size}")
        elif params.dimensions is not None or (not params.normalize and params.use_activation is None):
            name = "normalize" if params.dimensions is None else "dimensions"
            raise RequestError(name, getattr(params, name), "is for embeddings: leave it out")

    def prompt(self, name: str | None) -> str:
        """The text that `PoolingParams.prompt_name` puts before a text. Raises RequestError for an unknown name."""
        name = self.default_prompt if name is None else name
        if name and name not in self.prompts:
            known = ", ".join(self.prompts)
            accepted = f"must be one of {known}, the model's prompts" if known else "the model has no prompts"
            raise RequestError("prompt_name", name, f"{accepted}: leave it out")
        return self.prompts[name] if name else ""

    def output(self, values: np.ndarray, params: PoolingParams) -> Pooled:
        """Output for one prompt. values: float32[size] of its last token; float32[tokens, size] with `per_token`."""
        values = self._activated(values, params)
        if params.per_token:
            return TokenPoolingOutput(values)
        return (EmbeddingOutput if self.activation is None else ClassificationOutput)(values.tolist())

    def _activated(self, values: np.ndarray, params: PoolingParams) -> np.ndarray:
        """Embeddings of the requested length, or probabilities. values: float32[..., size]."""
        if self.activation is None:
            values = values[..., : params.dimensions]
            if not params.normalize:
                return values
            lengths = np.sqrt(np.sum(values * values, axis=-1, keepdims=True))
            return values / np.maximum(lengths, np.float32(1e-12))  # torch's epsilon
        if params.activation and self.activation is Activation.SOFTMAX:
            weights = np.exp(values - values.max(axis=-1, keepdims=True))
            return weights / weights.sum(axis=-1, keepdims=True)
        if params.activation and self.activation is Activation.SIGMOID:
            return np.exp(-np.logaddexp(np.float32(0), -values))
        return values


def check_task(pooling: Pooling | None, params: SamplingParams | PoolingParams | ScoringParams) -> None:
    """Raise RequestError if the engine does not support a request's task or parameters."""
    if pooling is None:
        if isinstance(params, PoolingParams):
            accepted = "the engine generates: to embed or classify, start with runner='pooling'"
            raise RequestError("runner", "generate", accepted)
    elif isinstance(params, PoolingParams):
        pooling.check(params)
    elif isinstance(params, SamplingParams | ScoringParams):
        instead = "" if pooling.activation is not None else ", or start without runner='pooling' to generate"
        raise RequestError("runner", "pooling", f"the engine does not generate: call {pooling.task}(){instead}")
