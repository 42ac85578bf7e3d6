"""Bodies and answers of the routes that replace the weights: SGLang's and vLLM's."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from jpaged.serving.schemas.requests import Int, SizeLimits

VERSION_PATHS = ("/weight_version", "/get_weight_version", "/weight_info")  # SGLang's now and before, and vLLM's

WeightsPath = Annotated[str, Meta(min_length=1, max_length=4_096)]
VersionLabel = Annotated[str, Meta(min_length=1, max_length=256)] | Int
Mode = Literal["wait", "keep", "recompute", "abort"]  # `jpaged.frontend.pausing.UpdateMode`


class UpdateFromDiskRequest(SizeLimits, kw_only=True):
    """Body of POST /update_weights_from_disk: SGLang's, and `mode`.

    abort_all_requests: the same as mode="abort". keep_pause: pause before the update, and stay paused.
    flush_cache:        no effect: KV of the old weights is never found again.
    """

    model_path: WeightsPath
    abort_all_requests: bool | None = None
    weight_version: VersionLabel | None = None
    keep_pause: bool | None = None
    flush_cache: bool | None = None
    mode: Mode | None = None

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "load_format": ("auto",), "is_async": (False,), "torch_empty_cache": (False, True),
        "recapture_cuda_graph": (False, True), "token_step": (0,), "manifest": (),
    }  # fmt: skip


TENSOR_FIELDS = ("names", "dtype_names", "shapes", "ipc_handles", "packed")  # vLLM's, of tensors over NCCL or IPC


class UpdateInfo(msgspec.Struct, forbid_unknown_fields=True):
    """`update_info` of POST /update_weights. weights_path: as vLLM's `reload_weights` calls it."""

    weights_path: WeightsPath


class UpdateWeightsRequest(SizeLimits, kw_only=True):
    """Body of POST /update_weights: a path in vLLM's `update_info`, or in `weight_dir`, as trainers on vLLM send it."""

    update_info: UpdateInfo | None = None
    weight_dir: WeightsPath | None = None
    weight_version: VersionLabel | None = None
    mode: Mode | None = None


class WeightsUpdated(msgspec.Struct, kw_only=True):
    """Answer of an update: SGLang's fields, and those of `jpaged.WeightUpdate`. error: of a failed one, as elsewhere.

    num_paused_requests: requests that waited during the update, and continue.
    """

    success: bool
    message: str
    num_paused_requests: int = 0
    weight_version: str | UnsetType = UNSET
    num_leaves: int | UnsetType = UNSET
    copied_bytes: int | UnsetType = UNSET
    seconds: float | UnsetType = UNSET  # during which no step ran
    error: dict[str, Any] | UnsetType = UNSET


class WeightVersionAnswer(msgspec.Struct):
    """Answer of GET /weight_version and its other names. A number is shown as text, as SGLang and vLLM do."""

    weight_version: str
