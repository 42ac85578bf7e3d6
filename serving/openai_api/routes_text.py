"""POST /tokenize and /detokenize, and GET /tokenizer_info."""

from collections.abc import Callable
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from jpaged.chat.prompt import template_text
from jpaged.errors import RequestError
from jpaged.parsers.definitions import checked_tools
from jpaged.serving.openai_api.chat_turns import rendered
from jpaged.serving.schemas.answers import DetokenizedText, TokenizerInfo, TokenList
from jpaged.serving.schemas.pooling import DetokenizeRequest, TokenizeRequest
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import read_body
from jpaged.serving.web.disconnect import until_disconnect
from jpaged.serving.web.json_pieces import JSONPieces, list_pieces, plain_pieces
from jpaged.text.encoder import text_encoder

CHAT_FIELDS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text, or of a conversation. The only limit is the body's size."""
    server: Server = request.app.state.server
    body = await read_body(request, TokenizeRequest)
    server.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        accepted = "is required; or messages" if body.prompt is None else "and messages exclude each other: send one"
        raise RequestError("prompt", body.prompt, accepted)
    for name in CHAT_FIELDS if body.messages is None else ():
        if getattr(body, name):
            raise RequestError(name, getattr(body, name), "is for messages: leave it out")
    tokenizer = _tokenizer(server)

    def work(cancelled: Callable[[], bool]) -> list[int]:
        if body.prompt is None:
            return rendered(server, body, tools=checked_tools(body.tools or []), add_generation_prompt=True)
        encoder = text_encoder(tokenizer)
        special = body.add_special_tokens is not False
        return encoder.encode("prompt", body.prompt, special_tokens=special, cancelled=cancelled).token_ids

    async def answer() -> Response:
        ids = await server.tokenising.run(len(body.prompt or ""), work)
        made = TokenList(
            count=len(ids), max_model_len=server.engine.max_model_len, tokens=cast(Any, await plain_pieces(ids))
        )
        if body.return_token_strs:
            names = await list_pieces(ids, lambda some, _: tokenizer.convert_ids_to_tokens(some))
            made.token_strs = cast(Any, names)
        return JSONPieces(made)

    return await until_disconnect(request.receive, answer())


async def detokenize(request: Request) -> Response:
    """Return the text of token ids, with special tokens."""
    server: Server = request.app.state.server
    body = await read_body(request, DetokenizeRequest)
    server.model_name(body.model)
    tokenizer = _tokenizer(server)

    def work(_: Callable[[], bool]) -> str:
        size = len(tokenizer)
        unknown = next((i for i, token_id in enumerate(body.tokens) if token_id >= size), None)
        if unknown is not None:
            accepted = f"the tokenizer has the ids 0 to {size - 1}"
            raise RequestError(f"tokens[{unknown}]", body.tokens[unknown], accepted)
        return tokenizer.decode(body.tokens)

    text = server.tokenising.run(len(body.tokens), work)
    return JSONPieces(DetokenizedText(await until_disconnect(request.receive, text)))


async def tokenizer_info(request: Request) -> Response:
    """Return the tokenizer's class and special tokens, and the chat template. lm-eval's remote tokenizer reads them."""
    server: Server = request.app.state.server
    tokenizer = _tokenizer(server)
    special = {name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return JSONPieces(
        TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            chat_template=template_text(tokenizer, server.chat.chat_template) or None,
            model_max_length=server.engine.max_model_len,
            **special,
        )
    )


def _tokenizer(server: Server) -> Any:
    tokenizer = server.engine.get_tokenizer()
    if tokenizer is None:
        raise RequestError("model", None, "the model has no tokenizer: start with the option tokenizer")
    return tokenizer
