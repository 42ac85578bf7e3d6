"""POST /v1/embeddings, /pooling and /classify, for an engine that was started with runner='pooling'."""

import asyncio
import base64
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jpaged.errors import RequestError
from jpaged.outputs import EmbeddingOutput, PoolingRequestOutput
from jpaged.params.pooling import PoolingParams
from jpaged.serving.openai_api import generation, pooled
from jpaged.serving.openai_api.generation import Head
from jpaged.serving.schemas.answers import (
    Classification,
    ClassificationList,
    Embedding,
    EmbeddingList,
    PooledList,
    PooledVector,
)
from jpaged.serving.schemas.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    EncodedInput,
    PooledInput,
    PoolingRequest,
)
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import read_body
from jpaged.serving.web.disconnect import until_disconnect
from jpaged.serving.web.json_pieces import JSONPieces, Pieces, list_pieces

AT_ONCE = 2  # vectors encoded between two turns of the event loop; one of 8,192 numbers takes 1 ms
NUMBERS = AT_ONCE * 8_192  # of token vectors encoded between two turns


async def embeddings(request: Request) -> Response:
    """Embed one or several inputs: a string, strings, token ids, or lists of token ids; or a conversation."""
    return await answer_embedding(request, await read_body(request, EmbeddingRequest))


async def answer_embedding(request: Request, body: EmbeddingRequest) -> Response:
    """Answer a parsed request for embeddings."""
    encode, scaled = _encoder(body), _use_activation(body)
    with generation.named_as_sent(pooled.NAMES):
        params = pooled.pooling_params(body, dimensions=body.dimensions, normalize=scaled, task="embed")
    head, finals = await _pooled(request, body, params)
    data = await _vectors(finals, lambda index, values: Embedding(index, encode(values)))
    return JSONPieces(
        EmbeddingList(
            id=head.id, created=head.created, model=head.model, data=cast(Any, data), usage=pooled.usage(finals)
        )
    )


async def pooling(request: Request) -> Response:
    """Return what the model pools: embeddings, or a classifier's probabilities."""
    return await answer_pooling(request, await read_body(request, PoolingRequest))


async def answer_pooling(request: Request, body: PoolingRequest) -> Response:
    """Answer a parsed pooling request."""
    server: Server = request.app.state.server
    task, encode = body.task or pooled.pooled_model(server).task, _encoder(body)
    activated = _use_activation(body)
    embeds = task.endswith("embed")
    if not embeds and body.normalize is not None:
        raise RequestError("normalize", body.normalize, "is for embeddings: send use_activation")
    with generation.named_as_sent(pooled.NAMES):
        fields = {"normalize" if embeds else "activation": activated}
        params = pooled.pooling_params(body, dimensions=body.dimensions, task=task, **fields)
    head, finals = await _pooled(request, body, params)
    data: list[PooledVector] | Pieces
    if params.per_token:
        data = [
            PooledVector(index=index, data=cast(Any, await _encoded(final.outputs.data, body)))
            for index, final in finals.items()
        ]
    else:
        data = await _vectors(finals, lambda index, values: PooledVector(index=index, data=encode(values)))
    return JSONPieces(
        PooledList(
            id=head.id, created=head.created, model=head.model, data=cast(Any, data), usage=pooled.usage(finals)
        )
    )


def _use_activation(body: EncodedInput) -> bool:
    """Return True to scale vectors to length 1, or to turn scores into probabilities. Raises RequestError."""
    if body.normalize is not None and body.use_activation not in (None, body.normalize):
        raise RequestError("normalize", body.normalize, "is another name of use_activation: send one of them")
    return body.use_activation is not False and body.normalize is not False


async def classify(request: Request) -> Response:
    """Classify one or several inputs."""
    return await answer_classify(request, await read_body(request, ClassifyRequest))


async def answer_classify(request: Request, body: ClassifyRequest) -> Response:
    """Answer a parsed request for classes."""
    server: Server = request.app.state.server
    labels = pooled.pooled_model(server).labels
    params = pooled.pooling_params(body, activation=body.use_activation is not False, task="classify")
    head, finals = await _pooled(request, body, params)

    def convert(some: Sequence[PoolingRequestOutput[Any]], start: int) -> list[Classification]:
        made = []
        for index, final in enumerate(some, start):
            probs = final.outputs.probs
            label = labels[max(range(len(probs)), key=probs.__getitem__)]
            made.append(Classification(index=index, label=label, probs=probs, num_classes=len(probs)))
        return made

    data = await list_pieces(list(finals.values()), convert)
    return JSONPieces(
        ClassificationList(
            id=head.id, created=head.created, model=head.model, data=cast(Any, data), usage=pooled.usage(finals)
        )
    )


async def _pooled(request: Request, body: PooledInput, params: PoolingParams) -> tuple[Head, pooled.Finals]:
    """Return the head of the answer, and the output of each prompt."""
    server: Server = request.app.state.server
    with generation.named_as_sent(pooled.NAMES if body.messages is None else {"prompt_token_ids": "messages"}):
        head = Head.new("embd", server.base_name(body.model), body.request_id)

        async def work() -> pooled.Finals:
            prompts = await pooled.input_prompts(server, body)
            return await pooled.pooled(server, prompts, params, head.request_id, body.priority or 0)

        return head, await until_disconnect(request.receive, work())


async def _vectors(finals: pooled.Finals, entry: Callable[[int, list[float]], Any]) -> Pieces:
    def convert(some: Sequence[PoolingRequestOutput[Any]], start: int) -> list[Any]:
        return [entry(index, _values(final)) for index, final in enumerate(some, start)]

    return await list_pieces(list(finals.values()), convert, AT_ONCE)


def _values(final: PoolingRequestOutput[Any]) -> list[float]:
    output = final.outputs
    return output.embedding if isinstance(output, EmbeddingOutput) else output.probs


async def _encoded(vectors: np.ndarray, body: EncodedInput) -> Pieces:
    """Encode float32[tokens, size], some vectors at a time: as lists of numbers, or as base64 of all their bytes."""
    at_once = 3 * max(1, NUMBERS // vectors.shape[1] // 3)  # a multiple of 3 vectors: its base64 has no padding
    if body.encoding_format != "base64":
        return await list_pieces(cast(Any, vectors), lambda some, _: cast(Any, some).tolist(), at_once)
    encode, parts = _encoder(body), []
    for first in range(0, len(vectors), at_once):
        parts.append(cast(str, encode(vectors[first : first + at_once])).encode())
        await asyncio.sleep(0)
    return Pieces((b'"', *parts, b'"'))


def _encoder(body: EncodedInput) -> Callable[[Any], Any]:
    """Return the function that encodes a vector: as a list of numbers, or as base64 of its bytes."""
    if body.encoding_format != "base64":
        for name, neutral in (("embed_dtype", "float32"), ("endianness", "native")):
            if getattr(body, name) not in (None, neutral):
                accepted = "is for encoding_format base64: leave it out, numbers have no bytes"
                raise RequestError(name, getattr(body, name), accepted)
        return lambda values: values
    dtype = body.embed_dtype or "float32"
    swapped = body.endianness == ("big" if sys.byteorder == "little" else "little")
    # The default is little-endian, which OpenAI's clients read. `native` is this machine's byte order.
    swapped = swapped or (body.endianness is None and sys.byteorder == "big")

    def encode(values: Any) -> str:
        array = np.array(values, np.float32)
        array = _bfloat16(array) if dtype == "bfloat16" else array.astype(dtype)
        return base64.b64encode((array.byteswap() if swapped else array).tobytes()).decode()

    return encode


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32[n] to the nearest bfloat16, ties to even. Returns their bits as uint16[n]."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
