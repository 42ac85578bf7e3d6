"""Reads the files of Sentence Transformers in a model's folder: pooling, prompts, and the length of a text.

- modules.json lists the modules. jpaged has Transformer, Pooling and Normalize. Others are refused by name.
- N_Pooling/config.json has the pooling mode. Older folders have it in 1_Pooling, without modules.json.
- config_sentence_transformers.json has prompts: texts that are put before a text, by name.
- sentence_bert_config.json has the number of tokens to which Sentence Transformers cuts a text.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpaged.errors import ModelLoadError
from jpaged.loading.checkpoint import read_json, read_json_list
from jpaged.loading.hub import MODULES, POOLING, PROMPTS, TEXT_LENGTH
from jpaged.models.spec import DecoderSpec, TextPooling

_KNOWN = ("Transformer", "Pooling", "Normalize")
_MODE = "pooling_mode_"  # begins the keys of old files; new ones have the short name under `pooling_mode`
_SHORT_NAMES = {"cls_token": "cls", "mean_tokens": "mean"}


@dataclasses.dataclass(frozen=True, slots=True)
class SentenceFiles:
    """Contents of the files. The defaults are those of a folder without them."""

    pooling: str | None = None  # Sentence Transformers' name of the mode; None: there is no Pooling module
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by name
    default_prompt: str | None = None  # name of the prompt that a text gets if the caller names none
    max_length: int | None = None      # tokens of a text; None: no limit but the model's

    @classmethod
    def read(cls, folder: Path) -> "SentenceFiles":
        """Read the files of a folder. Raises ModelLoadError for modules and values that jpaged does not support."""
        prompts, default = _prompts(folder)
        length = read_json(folder / TEXT_LENGTH).get("max_seq_length")
        if length is not None and (type(length) is not int or length < 1):
            raise ModelLoadError(f"{folder / TEXT_LENGTH}: max_seq_length={length!r} must be a whole number above 0")
        return cls(_pooling(folder), prompts, default, length)

    def applied(self, spec: DecoderSpec, folder: Path) -> DecoderSpec:
        """The spec with the folder's pooling mode and length. Raises ModelLoadError for an unsupported mode.

        An encoder without the files is pooled by the mean of its tokens, as Sentence Transformers does.
        """
        if spec.encoder is not None:
            spec = dataclasses.replace(spec, encoder=dataclasses.replace(spec.encoder, max_length=self.max_length))
        if spec.num_labels is not None or self.pooling is None:
            return spec
        known = [mode.value for mode in (TextPooling if spec.encoder is not None else (TextPooling.LAST,))]
        mode = _SHORT_NAMES.get(self.pooling, self.pooling)
        if mode not in known:
            raise ModelLoadError(
                f"{folder / POOLING}: pooling by {self.pooling} is not supported by jpaged for this model (only "
                f"{', '.join(known)}): use another checkpoint"
            )
        if spec.encoder is None:
            return spec
        encoder = dataclasses.replace(spec.encoder, pooling=TextPooling(mode))
        return dataclasses.replace(spec, encoder=encoder)


NO_FILES = SentenceFiles()


def _pooling(folder: Path) -> str | None:
    """Mode of the Pooling module."""
    file = folder / POOLING
    for module in read_json_list(folder / MODULES):
        module = module if isinstance(module, Mapping) else {"type": module}
        kind, path = str(module.get("type")), str(module.get("path", ""))
        name = kind.rsplit(".", 1)[-1]
        if name not in _KNOWN:
            raise ModelLoadError(
                f"{folder / MODULES}: the module {kind!r} is not supported by jpaged (only {', '.join(_KNOWN)}): use "
                "another checkpoint"
            )
        if name == "Pooling":
            if Path(path).name != path:
                raise ModelLoadError(f"{folder / MODULES}: path={path!r} must be a folder next to the file")
            file = folder / path / "config.json"
    values = read_json(file)
    if values.get("include_prompt") is False:
        raise ModelLoadError(f"{file}: include_prompt=false is not supported by jpaged: use another checkpoint")
    modes = [values["pooling_mode"]] if "pooling_mode" in values else []
    modes += [name.removeprefix(_MODE) for name, value in values.items() if name.startswith(_MODE) and value is True]
    return ", ".join(map(str, modes)) or None


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    file = folder / PROMPTS
    values: dict[str, Any] = read_json(file)
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelLoadError(f"{file}: prompts={prompts!r} must be an object of texts")
    if default is not None and default not in prompts:
        raise ModelLoadError(f"{file}: default_prompt_name={default!r} must be one of {', '.join(prompts) or 'none'}")
    return prompts, default
