"""POST /update_weights_from_disk (SGLang) and /update_weights (vLLM), and GET /weight_version.

The first two need an admin key.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from jpaged.errors import JPagedError, RequestError
from jpaged.serving.schemas.weights import (
    TENSOR_FIELDS,
    UpdateFromDiskRequest,
    UpdateWeightsRequest,
    WeightsUpdated,
    WeightVersionAnswer,
)
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import read_body
from jpaged.serving.web.error_responses import error_body
from jpaged.serving.weights.served_weights import DoneUpdate, ServedWeights, UpdateOrder

ACCEPTED = 'send one path: {"update_info": {"weights_path": PATH}}, or {"weight_dir": PATH}'


def routes() -> list[BaseRoute]:
    """Return the routes that need an admin key."""
    return [
        Route("/update_weights_from_disk", update_weights_from_disk, methods=["POST"]),
        Route("/update_weights", update_weights, methods=["POST"]),
    ]


async def update_weights_from_disk(request: Request) -> Response:
    """Replace the weights by those of a checkpoint, with SGLang's body and answer. Answers when they are in use.

    Running requests finish first, as in SGLang, unless `mode` or `abort_all_requests` says otherwise. On a paused
    server they keep their KV, and continue after /resume.
    """
    try:
        _refuse_arguments(request)
        body = await read_body(request, UpdateFromDiskRequest)
        if body.abort_all_requests and body.mode not in (None, "abort"):
            raise RequestError("abort_all_requests", True, f"contradicts mode {body.mode!r}: send one of them")
        server: Server = request.app.state.server
        mode = "abort" if body.abort_all_requests else body.mode
        if mode is None:
            mode = "keep" if await server.engine.is_paused() else "wait"
        order = UpdateOrder("model_path", body.model_path, body.weight_version, mode, keep_pause=bool(body.keep_pause))
        done = await _updates(request).update(order)
    except JPagedError as error:
        status, failed = error_body(error)
        found = WeightsUpdated(success=False, message=failed["error"]["message"], error=failed["error"])
        return _json(found, status)
    message = "Succeeded to update model weights."  # SGLang's words
    if body.weight_version is not None:
        message += f" Weight version updated to {done.result.version}."
    return _json(_answer(done, message))


async def update_weights(request: Request) -> Response:
    """Replace the weights by those of a checkpoint. Running requests continue, unless `mode` says otherwise."""
    _refuse_arguments(request)
    try:
        body = await read_body(request, UpdateWeightsRequest)
    except RequestError as error:
        if error.parameter.removeprefix("update_info.") in TENSOR_FIELDS:
            known = f"tensors over NCCL or IPC are not supported: write a checkpoint, and {ACCEPTED}"
            raise RequestError(error.parameter, error.value, known) from None
        raise
    if (body.update_info is None) == (body.weight_dir is None):
        raise RequestError("update_info", None, ACCEPTED)
    field, path = "weight_dir", body.weight_dir
    if body.update_info is not None:
        field, path = "update_info.weights_path", body.update_info.weights_path
    order = UpdateOrder(field, path or "", body.weight_version, body.mode or "keep")
    return _json(_answer(await _updates(request).update(order), "Weights updated"))


async def weight_version(request: Request) -> Response:
    """Return the version of the weights."""
    server: Server = request.app.state.server
    return _json(WeightVersionAnswer(str(server.engine.weight_version)))


def _answer(done: DoneUpdate, message: str) -> WeightsUpdated:
    result = done.result
    return WeightsUpdated(
        success=True, message=message, num_paused_requests=done.num_waiting, weight_version=str(result.version),
        num_leaves=result.num_leaves, copied_bytes=result.copied_bytes, seconds=result.seconds,
    )  # fmt: skip


def _updates(request: Request) -> ServedWeights:
    return request.app.state.weights


def _refuse_arguments(request: Request) -> None:
    for name, value in request.query_params.items():
        raise RequestError(name, value, "unknown query parameter; known: none")


def _json(data: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")
