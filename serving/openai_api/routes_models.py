"""GET /v1/models and /v1/models/{model}: in OpenAI's shape, or in Anthropic's if the client speaks that API.

And SGLang's GET /model_info.
"""

import datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jpaged.errors import RequestError
from jpaged.serving.adapters.served_adapters import AdapterCard
from jpaged.serving.schemas.answers import ModelCard, ModelList, ModelPermission, ServedModelInfo
from jpaged.serving.schemas.messages_answers import ModelInfo, ModelInfoList
from jpaged.serving.server_state import Server
from jpaged.serving.web.error_responses import speaks_anthropic

MAX_PAGE, DEFAULT_PAGE = 1_000, 20  # models, as in Anthropic's API


async def models(request: Request) -> Response:
    """List the names of the served model, and the LoRA adapters."""
    server: Server = request.app.state.server
    if speaks_anthropic(request.scope):
        return _json(_page(server, request))
    adapters = () if server.adapters is None else server.adapters.cards()
    cards = [_card(server, name) for name in server.model_names]
    return _json(ModelList([*cards, *(_adapter_card(server, adapter) for adapter in adapters)]))


async def model(request: Request) -> Response:
    """Return the entry of one model name, or one adapter."""
    server: Server = request.app.state.server
    name = server.model_name(request.path_params["model"])
    if speaks_anthropic(request.scope):
        return _json(_info(server, name))
    adapters = () if server.adapters is None or name in server.model_names else server.adapters.cards()
    found = next((_adapter_card(server, adapter) for adapter in adapters if adapter.name == name), None)
    return _json(_card(server, name) if found is None else found)


def _page(server: Server, request: Request) -> ModelInfoList:
    """Return a page of the model names. Raises RequestError for a bad query."""
    query, names = request.query_params, list(server.model_names)
    if server.adapters is not None:
        names += [adapter.name for adapter in server.adapters.cards()]
    limit, after, before = query.get("limit", str(DEFAULT_PAGE)), query.get("after_id"), query.get("before_id")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= MAX_PAGE):
        raise RequestError("limit", limit, f"must be 1 to {MAX_PAGE}")
    if after is not None and before is not None:
        raise RequestError("before_id", before, "does not go with after_id: send one of them")
    for field, value in (("after_id", after), ("before_id", before)):
        if value is not None and value not in names:
            raise RequestError(field, value, "must be the id of a model of this server")
    if before is not None:
        found = names[: names.index(before)]
        page = found[-int(limit) :]
    else:
        found = names if after is None else names[names.index(after) + 1 :]
        page = found[: int(limit)]
    return ModelInfoList(
        data=[_info(server, name) for name in page],
        has_more=len(page) < len(found),
        first_id=page[0] if page else None,
        last_id=page[-1] if page else None,
    )


def _info(server: Server, name: str) -> ModelInfo:
    created = datetime.datetime.fromtimestamp(server.created, datetime.UTC)
    return ModelInfo(id=name, display_name=name, created_at=created, max_input_tokens=server.engine.max_model_len - 1)


async def model_info(request: Request) -> Response:
    """Return the model's path and the version of its weights, as SGLang does."""
    server: Server = request.app.state.server
    path = _root(server)
    tokenizer = None if server.config is None else server.config.tokenizer
    version, generates = str(server.engine.weight_version), server.engine.pooling is None
    return _json(ServedModelInfo(
        model_path=path, tokenizer_path=tokenizer or path, is_generation=generates, weight_version=version
    ))  # fmt: skip


def _root(server: Server) -> str:
    return server.model_names[0] if server.root is None else server.root


def _card(server: Server, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=server.created,
        root=_root(server),
        max_model_len=server.engine.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=server.created)],
    )


def _adapter_card(server: Server, adapter: AdapterCard) -> ModelCard:
    created = adapter.created or server.created
    return ModelCard(
        id=adapter.name,
        created=created,
        root=adapter.root,
        parent=adapter.parent,
        max_model_len=server.engine.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{adapter.name}", created=created)],
    )


def _json(data: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")
