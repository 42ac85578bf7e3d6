"""`jpaged convert`: writes a model as an Orbax checkpoint, and restores the Hugging Face files from one.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import pathlib
from typing import Annotated, Literal

import tyro

from jpaged.cli.flags.engine import one_line_help
from jpaged.errors import RequestError


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert a model into a folder with an Orbax checkpoint, or back into Hugging Face files.

    Every command accepts the folder as MODEL. Its weights are stored in the engine's fused layout, so that each process
    of an engine reads only its own part.

    Example: jpaged convert Qwen/Qwen3-0.6B qwen3 && jpaged serve qwen3

    Example: jpaged convert qwen3 qwen3-hf --to hf
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL", help_behavior_hint="")]
    """Folder, Hugging Face hub id, or demo. With --to hf: a folder that this command wrote."""

    out: Annotated[tyro.conf.Positional[pathlib.Path], tyro.conf.arg(metavar="OUT", help_behavior_hint="")]
    """Folder to write. It must be new or empty."""

    to: Literal["orbax", "hf"] = "orbax"
    """orbax: convert a model into an Orbax checkpoint. hf: restore the Hugging Face files from one. They have the
    original bytes, unless the conversion rounded or unpacked the weights."""

    dtype: str = "auto"
    """dtype of the weights: auto, bfloat16, float16 or float32. auto: the checkpoint's own dtype."""

    revision: Annotated[str | None, tyro.conf.arg(metavar="STR", help_behavior_hint="")] = None
    """Branch, tag or commit of a hub id. Default: the main branch."""

    def run(self) -> int:
        for name, default in (("dtype", "auto"), ("revision", None)):
            if self.to == "hf" and getattr(self, name) != default:
                raise RequestError(name, getattr(self, name), "has no meaning with --to hf: leave it out")
        import jax

        # Conversion needs no accelerator. Orbax would start it and occupy its memory.
        jax.config.update("jax_platforms", "cpu")
        from jpaged.loading.convert import convert, export

        if self.to == "hf":
            written = export(self.model, self.out)
            state = (
                "the files are the original files, byte for byte"
                if written.same_files
                else f"the weights are {written.dtype.name} in one new model.safetensors: they were rounded or "
                "unpacked when they were converted, so the original bytes are lost"
            )
        else:
            written = convert(self.model, self.out, dtype=self.dtype, revision=self.revision)
            back = f"jpaged convert {self.out} FOLDER --to hf"
            state = f"use it:  jpaged generate {self.out}\n" + (
                f"restore the Hugging Face files:  {back}"
                if written.same_files
                else f"the original files cannot be restored; for Hugging Face files in {written.dtype.name}:  {back}"
            )
        print(f"wrote {self.out}: {written.num_bytes / 1e6:,.1f} MB, {written.dtype.name}\n{state}")
        return 0
