"""Compares the layers of a checkpoint with Transformers' layers, and names the first layer that differs.

    python -m jpaged.loading.check MODEL                         compare with Transformers; needs torch
    python -m jpaged.loading.check MODEL --record answers.json   the same, and write Transformers' values to a file
    python -m jpaged.loading.check MODEL --answers answers.json  compare with the values in the file, without torch

1. Both run the same token ids in float32 with dense attention. This compares the model, not the engine.
2. The input of the first layer and the output of each layer are compared. Then the logits of the last token, a
   classifier's scores, or, with --runner pooling, the last token's hidden state after the final norm.
3. The first output that differs is named. Later outputs differ because of it and are not shown.

An entry point: no other module imports it.

Imported late: torch and Transformers, which jpaged does not need.
"""

import base64
import dataclasses
import json
import pathlib
import sys
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro

from jpaged.config import EngineConfig
from jpaged.errors import JPagedError, ModelLoadError, RequestError
from jpaged.loading import LoadedModel, load_model
from jpaged.models.decoder import decode, dense_causal_attend, lm_head

NUM_TOKENS = 24  # more than the sliding windows of the tests' models; the answers of a 7B model take 18 MB

# Largest difference that counts as rounding, as a share of the token's largest value. Another order of float32 sums
# gave at most 7e-6 over all models of tests/golden, and 1e-5 after the 24 layers of a Qwen2 0.5B. Real errors are
# larger: with a norm epsilon of 2e-5 instead of 1e-6, the demo model's first layer is off by 6e-4.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Answers:
    """Values that one implementation computes for a prompt."""

    token_ids: list[int]
    outputs: list[np.ndarray]  # float32[tokens, hidden]: input of the first layer, then the output of each layer
    logits: np.ndarray         # float32[1, output]: of the last token; or its scores, or its state after the final norm

    def write(self, path: pathlib.Path) -> None:
        """Write a JSON file. Arrays are base64 of little-endian float32."""
        arrays = [_encode(array) for array in (*self.outputs, self.logits)]
        path.write_text(json.dumps({"token_ids": self.token_ids, "arrays": arrays}) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: pathlib.Path) -> "Answers":
        """Read a file that `write` wrote. Raises RequestError."""
        try:
            values = json.loads(path.read_text(encoding="utf-8-sig"))
            *outputs, logits = (_decode(array) for array in values["arrays"])
            return cls(values["token_ids"], outputs, logits)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestError("answers", str(path), f"must be a file that --record wrote ({error})") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Compare a checkpoint's layers with Transformers', and name the first one that differs.

    The exit status is 0 if all agree, 1 if one differs, and 2 if the comparison failed.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL", help_behavior_hint="")]
    """Folder or Hugging Face hub id."""

    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """Text to run. Default: a fixed set of token ids."""

    answers: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Compare with the values in this file, which --record wrote. Does not need torch."""

    record: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Write Transformers' values to this file."""

    runner: Literal["auto", "generate", "pooling"] = "auto"
    """pooling: compare the last token's hidden state, for a model without lm_head."""

    tolerance: float = TOLERANCE
    """Largest difference that passes, as a share of the token's largest value."""

    def run(self) -> int:
        """Compare and print the table. Returns the exit status."""
        if self.answers is not None and (self.record is not None or self.prompt is not None):
            other = "record" if self.record is not None else "prompt"
            raise RequestError(other, getattr(self, other), "does not go with --answers: leave one of them out")
        expected = None if self.answers is None else Answers.read(self.answers)
        if expected is None:
            _need_torch()
        model = load_model(EngineConfig(model=self.model, dtype="float32", runner=self.runner))
        if model.spec.encoder is not None:
            raise ModelLoadError(f"{model.source} is an encoder: this check compares decoders")
        if model.spec.hyper is not None:
            raise ModelLoadError(f"{model.source} has several streams of hidden states: this check compares one")
        if expected is None:
            expected = transformers_answers(model, self._token_ids(model))
            if self.record is not None:
                expected.write(self.record)
        return compare(model, expected, self.tolerance)

    def _token_ids(self, model: LoadedModel) -> list[int]:
        if self.prompt is None:
            return fixed_token_ids(model.spec.vocab_size)
        if model.tokenizer is None:
            raise RequestError("prompt", self.prompt, "the model has no tokenizer: leave the prompt out")
        ids = model.tokenizer(self.prompt)["input_ids"]
        if not ids:
            raise RequestError("prompt", self.prompt, "gives no tokens")
        return list(ids)


def fixed_token_ids(vocab_size: int) -> list[int]:
    """NUM_TOKENS token ids, spread over the vocabulary."""
    return [(7 + 7919 * i) % vocab_size for i in range(NUM_TOKENS)]


def output_after(model: LoadedModel, token_ids: list[int], layers: int) -> np.ndarray:
    """float32[tokens, hidden]: our hidden states after the first `layers` layers. 0: the input of the first layer."""
    ids = jnp.asarray(token_ids, jnp.int32)
    hidden, *_ = decode(
        model.spec,
        model.params | {"layers": model.params["layers"][:layers]},
        ids,
        jnp.arange(len(ids)),
        [None] * layers,
        ids[None],
        dense_causal_attend,
        rope_lens=jnp.full(len(ids), len(ids)),
    )
    return np.asarray(hidden)


def last_logits(model: LoadedModel, hidden: np.ndarray) -> np.ndarray:
    """float32[1, output]: our logits (or pooled vector) of the last token. hidden: states after the last layer."""
    return np.asarray(lm_head(model.spec, model.params, jnp.asarray(hidden[-1:])))


def compare(model: LoadedModel, expected: Answers, tolerance: float) -> int:
    """Print the difference of each layer, up to the first that differs. Returns 1 if one differs, else 0."""
    spec = model.spec
    name, kind, rest = "logits", "tokens", "the final norm or the lm_head does not"
    if spec.pools:
        name, kind, rest = "last state", "numbers", "the final norm does not"
    if spec.num_labels is not None:
        name, kind, rest = "scores", "labels", "the final norm or the score matrix does not"
    shapes = [(len(expected.token_ids), spec.hidden_size)] * (spec.num_layers + 1) + [(1, spec.output_size)]
    if [array.shape for array in (*expected.outputs, expected.logits)] != shapes:
        raise ModelLoadError(
            f"{model.source} has {spec.num_layers} layers of width {spec.hidden_size} and {spec.output_size:,} "
            f"{kind}. The answers have {len(expected.outputs) - 1} layers of width {expected.outputs[0].shape[-1]} and "
            f"{expected.logits.shape[-1]:,} {kind}. They are from another model"
        )
    print(f"{model.source}: {len(expected.token_ids)} tokens, float32, tolerance {tolerance:g} of the largest value\n")
    print(f"{'':12} max |difference|   max |value|      share")
    ours = np.empty(0)
    for layers, theirs in enumerate(expected.outputs):
        ours = output_after(model, expected.token_ids, layers)
        if not _agree(f"layer {layers - 1}" if layers else "embedding", ours, theirs, tolerance):
            before = "its input agrees" if layers else "no layer has run yet"
            print(f"\nthe first difference is in {f'layer {layers - 1}' if layers else 'the embedding'}: {before}")
            return 1
    if not _agree(name, last_logits(model, ours), expected.logits, tolerance):
        print(f"\nthe first difference is in the {name}: all layers agree, {rest}")
        return 1
    print("\nall agree")
    return 0


def _agree(name: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> bool:
    """Print one line of the table. The share is per token: the first token's values are often 1,000 times larger."""
    difference = np.abs(ours - theirs)
    share = (difference.max(-1) / np.maximum(np.abs(theirs).max(-1), np.finfo(np.float32).tiny)).max()
    agree = bool(share <= tolerance)  # False for NaN
    verdict = "agrees" if agree else "DIFFERS"
    print(f"{name:12} {difference.max():16.3g} {np.abs(theirs).max():13.4g} {share:10.2g}   {verdict}", flush=True)
    return agree


def transformers_answers(model: LoadedModel, token_ids: list[int]) -> Answers:
    """Transformers' values, in float32 on CPU."""
    import torch
    import transformers

    kind = transformers.AutoModel if model.spec.pools else transformers.AutoModelForCausalLM
    if model.spec.num_labels is not None:
        kind = transformers.AutoModelForSequenceClassification
    try:
        # Eager attention is the reference for soft caps and sinks. For Falcon's ALiBi it adds the biases twice.
        attention = "sdpa" if model.config.get("alibi") else "eager"
        theirs = kind.from_pretrained(
            model.source, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{model.source}: Transformers cannot load it: {error}") from None
    outputs: list[np.ndarray] = []

    def keep(value: Any) -> None:
        hidden = value[0] if isinstance(value, tuple) else value
        outputs.append(hidden.detach().numpy().reshape(len(token_ids), -1).copy())

    lists = (module for module in theirs.modules() if isinstance(module, torch.nn.ModuleList))
    layers = next(layers for layers in lists if len(layers) == model.spec.num_layers)
    layers[0].register_forward_pre_hook(
        lambda _, args, named: keep(args or named["hidden_states"]), with_kwargs=True
    )
    for layer in layers:
        layer.register_forward_hook(lambda _, args, output: keep(output))
    with torch.no_grad():
        out = theirs.eval()(torch.tensor([token_ids]))
    if model.spec.num_labels is not None:
        logits = out.logits
    else:
        logits = (out.last_hidden_state if model.spec.pools else out.logits)[0, -1:]
    return Answers(token_ids, outputs, logits.float().numpy())


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise RequestError(
            "answers", None, "torch is not installed: install it, or give a file that --record wrote elsewhere"
        ) from None


def _encode(array: np.ndarray) -> dict[str, Any]:
    return {"shape": array.shape, "float32": base64.b64encode(array.astype("<f4").tobytes()).decode()}


def _decode(values: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(values["float32"]), "<f4").reshape(values["shape"])


def main(args: list[str] | None = None) -> int:
    """Run one command line."""
    try:
        return tyro.cli(Check, prog="python -m jpaged.loading.check", args=args).run()
    except JPagedError as error:
        print(f"{error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
