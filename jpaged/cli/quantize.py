"""`jpaged quantize`: writes a checkpoint with 8-bit or 4-bit weights, which other engines also read.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import pathlib
from typing import Annotated, Literal

import tyro

from jpaged.cli.flags.engine import one_line_help, read_text


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize:
    """Quantise a checkpoint into a new folder, in the format of compressed-tensors.

    The matrices of the layers are quantised. Embeddings, lm_head, norms and biases keep their dtype.

    Example: jpaged quantize Qwen/Qwen3-0.6B qwen3-w8a8 --scheme w8a8

    Example: jpaged quantize Qwen/Qwen3-0.6B qwen3-w4a16 --scheme w4a16 --method gptq --calibration text.txt
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL", help_behavior_hint="")]
    """Folder, Hugging Face hub id, or demo."""

    out: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="OUT", help_behavior_hint="")]
    """Folder to write. It must be new or empty."""

    scheme: Literal["w4a16", "w8a8", "w4a8", "fp8"]
    """w4a16: 4-bit weights, one scale per group of inputs. w8a8: 8-bit weights, one scale per output; engines round
    activations to 8 bits. w4a8: weights of w4a16, activations of w8a8. fp8: weights and activations in float8 (e4m3),
    one scale per output and per token."""

    method: Literal["rtn", "gptq", "awq"] = "rtn"
    """rtn: round to nearest, with the scales of smallest squared error. gptq (arXiv:2210.17323): minimise the error of
    each layer's outputs on the calibration text; slower and better. awq (arXiv:2306.00978): protect inputs with large
    activations; for w4a16 and w4a8."""

    calibration: Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """UTF-8 text for gptq and awq, similar to the model's inputs: at least 2,048 tokens. At most 32,768 are used."""

    group_size: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Inputs per scale, for w4a16 and w4a8. Default: the first of 128, 64 and 32 that divides all matrices."""

    revision: Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")] = None
    """Branch, tag or commit of a hub id. Default: the main branch."""

    def run(self) -> int:
        import jax

        jax.config.update("jax_platforms", "cpu")  # quantisation runs on the host
        from jpaged.quantizing import quantize_checkpoint

        written = quantize_checkpoint(
            self.model,
            self.out,
            scheme=self.scheme,
            method=self.method,
            calibration=read_text("calibration", self.calibration),
            group_size=self.group_size,
            revision=self.revision,
        )
        groups = "" if written.group_size is None else f", groups of {written.group_size}"
        text = f", {written.calibration_tokens:,} tokens of calibration text" if written.calibration_tokens else ""
        sizes = f"{written.num_bytes / 1e6:,.1f} MB (weights before: {written.source_bytes / 1e6:,.1f} MB)"
        print(f"wrote {self.out}: {sizes}, {written.matrices} matrices in {self.scheme} by {self.method}{groups}{text}")
        return 0
