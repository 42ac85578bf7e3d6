"""`LoRARequest`: names the LoRA adapter of a request, with vLLM's fields."""

import dataclasses
import os

from jpaged.errors import RequestError


@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter for `LLM.generate(..., lora_request=...)`.

    lora_name:    name of the adapter, printable text. A name belongs to one adapter at a time.
    lora_int_id:  a number above 0, of your choice; other adapters must have other numbers.
    lora_path:    folder in PEFT's format, with adapter_config.json and adapter_model.safetensors. "": the adapter of
                  this name that the engine has already.
    base_model_name: accepted, and not used.
    load_inplace: read the folder again, once per call, if the name is in use. Later requests get the new adapter.

    Raises RequestError for a value of a wrong kind.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError("lora_name", self.lora_name, "must be a text of one or more characters")
        if not _is_unicode(self.lora_name):  # prefixes are named by digests of UTF-8
            raise RequestError("lora_name", ascii(self.lora_name), "must be Unicode text without lone surrogates")
        if not self.lora_name.isprintable():  # it is printed in logs, tables and labels of metrics
            raise RequestError("lora_name", self.lora_name, "must have no line breaks or other control characters")
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise RequestError("lora_int_id", self.lora_int_id, "must be a whole number above 0")
        if not isinstance(self.lora_path, (str, os.PathLike)):
            raise RequestError("lora_path", self.lora_path, "must be the path of a folder")
        object.__setattr__(self, "lora_path", os.fspath(self.lora_path))

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
