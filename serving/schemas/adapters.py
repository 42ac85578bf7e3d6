"""Bodies of the routes that load and unload LoRA adapters: vLLM's."""

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from jpaged.serving.schemas.requests import Int, Label, SizeLimits


class LoadAdapterRequest(SizeLimits, kw_only=True):
    """Body of POST /v1/load_lora_adapter. load_inplace: replace the adapter of this name, if there is one."""

    lora_name: Annotated[Label, Meta(min_length=1)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4_096)]
    load_inplace: bool | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"is_3d_lora_weight": (False, True)}


class UnloadAdapterRequest(SizeLimits, kw_only=True):
    """Body of POST /v1/unload_lora_adapter. One field is enough."""

    lora_name: Label | None = None
    lora_int_id: Int | None = None
