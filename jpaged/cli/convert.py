"""`jpaged convert`: the engine's own weights in an Orbax checkpoint, and the Hugging Face files back."""

import dataclasses
import pathlib
from typing import Annotated, Literal

import tyro

from jpaged.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a checkpoint as a folder that every command takes as MODEL: an Orbax checkpoint of the engine's own tree,
    its matrices fused as the engine wants them, so that each process of several can read its part alone.

    Example: jpaged convert Qwen/Qwen3-0.6B qwen3 && jpaged serve qwen3

    Example: jpaged convert qwen3 qwen3-hf --to hf
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL", help_behavior_hint="")]
    """Folder, Hugging Face hub id, or demo; with --to hf a folder that this command wrote."""

    out: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="OUT", help_behavior_hint="")]
    """Folder to write: a new one, or an empty one."""

    to: Literal["orbax", "hf"] = "orbax"
    """hf writes the Hugging Face files back: the same bytes, unless --dtype changed the weights."""

    dtype: str = "auto"
    """auto, bfloat16, float16 or float32. auto is the checkpoint's own, whatever the device."""

    revision: Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")] = None
    """Branch, tag or commit of a hub id."""

    def run(self) -> int:
        """Convert, and say what was written."""
        for name, default in (("dtype", "auto"), ("revision", None)):
            if self.to == "hf" and getattr(self, name) != default:
                raise RequestError(name, getattr(self, name), "has no meaning with --to hf: leave it out")
        import jax

        # Nothing of this needs an accelerator, and Orbax would start one, which takes its memory.
        jax.config.update("jax_platforms", "cpu")
        from jpaged.loading.convert import convert, export

        if self.to == "hf":
            written = export(self.model, self.out)
            state = (
                "the files are those that were converted, byte for byte"
                if written.same_files
                else f"the weights are {written.dtype.name} in one new model.safetensors: they were rounded or "
                "unpacked when they were converted, so the original bytes cannot be had back"
            )
        else:
            written = convert(self.model, self.out, dtype=self.dtype, revision=self.revision)
            back = f"jpaged convert {self.out} FOLDER --to hf"
            state = f"use it:  jpaged generate {self.out}\n" + (
                f"the same Hugging Face files again:  {back}"
                if written.same_files
                else f"the source's own files cannot be had back; Hugging Face files in {written.dtype.name}:  {back}"
            )
        print(f"wrote {self.out}: {written.num_bytes / 1e6:,.1f} MB, {written.dtype.name}\n{state}")
        return 0
