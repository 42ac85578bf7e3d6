"""POST /v1/embeddings, for an engine that was started with runner='pooling'."""

import base64
from contextlib import aclosing
from http import HTTPStatus

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jpaged.frontend.prompt_streams import merge_streams
from jpaged.outputs import EmbeddingOutput, PoolingRequestOutput
from jpaged.params.pooling import PoolingParams
from jpaged.serving import generation
from jpaged.serving.body import read_body
from jpaged.serving.disconnect import until_disconnect
from jpaged.serving.engine_client import Prompt
from jpaged.serving.error_responses import APIError
from jpaged.serving.generation import Head, Server
from jpaged.serving.request_schema import EmbeddingRequest
from jpaged.serving.response_schema import Embedding, EmbeddingList, EmbeddingUsage
from jpaged.serving.routes_completions import prompt_list

MAX_INPUTS = 2048  # per request, as in OpenAI's API


async def embeddings(request: Request) -> Response:
    """Embed one or several inputs: a string, strings, token ids, or lists of token ids."""
    server: Server = request.app.state.server
    body = await read_body(request, EmbeddingRequest)
    with generation.named_as_sent({"prompt_token_ids": "input", "prompt": "input"}):
        head = Head.new("embd", server.model_name(body.model))
        params = PoolingParams(dimensions=body.dimensions, task="embed")
        prompts = generation.salted(prompt_list(body.input, MAX_INPUTS), body)
        work = _embedded(server, prompts, params, head.request_id, body.priority or 0)
        finals = await until_disconnect(request.receive, work)
    data = [Embedding(index, _encoded(final.outputs, body.encoding_format)) for index, final in finals.items()]
    tokens = sum(len(final.prompt_token_ids) for final in finals.values())
    answer = EmbeddingList(data, head.model, EmbeddingUsage(tokens, tokens))
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _embedded(
    server: Server, prompts: list[Prompt], params: PoolingParams, request_id: str, priority: int
) -> dict[int, PoolingRequestOutput[EmbeddingOutput]]:
    """Return the output of each prompt, in the prompts' order. Raises APIError if one was aborted."""
    streams = [
        server.engine.encode(prompt, params, f"{request_id}-{i}", priority=priority) for i, prompt in enumerate(prompts)
    ]
    async with aclosing(merge_streams(streams)) as outputs:
        finals = {prompt: output async for prompt, output in outputs}
    if any(final.outputs is None for final in finals.values()):
        raise APIError(HTTPStatus.SERVICE_UNAVAILABLE, generation.ABORTED, code="aborted")
    return dict(sorted(finals.items()))


def _encoded(output: EmbeddingOutput, encoding_format: str | None) -> list[float] | str:
    """Encode an embedding as a list of numbers, or as base64 of little-endian float32."""
    if encoding_format != "base64":
        return output.embedding
    return base64.b64encode(np.array(output.embedding, "<f4").tobytes()).decode()
