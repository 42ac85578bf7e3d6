"""POST /score and /rerank: how well texts fit together.

An embedding model scores by the cosine of two embeddings. A sequence classifier with one label reads both texts as a
pair, and its probability is the score.
"""

import asyncio
import dataclasses
from collections.abc import Callable

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jpaged.errors import RequestError
from jpaged.params.pooling import PairFormat
from jpaged.serving.engine_client import Prompt
from jpaged.serving.openai_api import generation, pooled
from jpaged.serving.openai_api.generation import Head
from jpaged.serving.openai_api.prompts import plain_ids, salted
from jpaged.serving.schemas.answers import (
    EmbeddingUsage,
    RankedDocument,
    RankedText,
    Ranking,
    Score,
    ScoreList,
)
from jpaged.serving.schemas.pooling import RerankRequest, ScoreRequest, ScoringFields
from jpaged.serving.server_state import Server
from jpaged.serving.web.body import read_body
from jpaged.serving.web.disconnect import until_disconnect
from jpaged.serving.web.json_pieces import JSONPieces
from jpaged.text.encoder import TokenLimit
from jpaged.text.pairs import check_scores, pair_prompt

PAIRS = (
    ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Texts:
    """The texts of a request: one query for all documents, or one for each. The names are the request's fields."""

    queries: list[str]
    documents: list[str]
    query_name: str
    document_name: str

    def __post_init__(self) -> None:
        for name, texts in ((self.query_name, self.queries), (self.document_name, self.documents)):
            if not texts:
                raise RequestError(name, [], "must not be empty")
            if not all(texts):
                raise RequestError(name, "", "a text must not be empty")
        if len(self.queries) not in (1, len(self.documents)):
            accepted = f"must be one text, or one for each of {self.document_name} ({len(self.documents)})"
            raise RequestError(self.query_name, f"{len(self.queries)} texts", accepted)

    @property
    def length(self) -> int:
        """Number of characters of all texts."""
        return sum(map(len, (*self.queries, *self.documents)))


async def score(request: Request) -> Response:
    """Score pairs of texts."""
    return await answer_score(request, await read_body(request, ScoreRequest))


async def answer_score(request: Request, body: ScoreRequest) -> Response:
    """Answer a parsed request for scores."""
    given = {name for pair in PAIRS for name in pair if getattr(body, name) is not None}
    pair = next((pair for pair in PAIRS if given == set(pair)), None)
    if pair is None:
        accepted = f"send one pair of {', '.join(f'{a} and {b}' for a, b in PAIRS)}"
        raise RequestError("text_1", sorted(given), accepted)
    first, second = (getattr(body, name) for name in pair)
    texts = _Texts(
        [first] if isinstance(first, str) else first, [second] if isinstance(second, str) else second, *pair
    )
    head, scores, usage = await _scores(request, body, texts)
    data = [Score(index=index, score=value) for index, value in enumerate(scores)]
    return JSONPieces(ScoreList(id=head.id, created=head.created, model=head.model, data=data, usage=usage))


async def rerank(request: Request) -> Response:
    """Order documents by how well they fit a query, best first."""
    return await answer_rerank(request, await read_body(request, RerankRequest))


async def answer_rerank(request: Request, body: RerankRequest) -> Response:
    """Answer a parsed request for a ranking."""
    if body.top_n is not None and body.top_n < 0:
        raise RequestError("top_n", body.top_n, "must be at least 0; 0 returns all documents")
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    head, scores, usage = await _scores(request, body, _Texts([body.query], documents, "query", "documents"))
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or len(scores)]
    results = [RankedDocument(index=index, relevance_score=scores[index]) for index in order]
    if body.return_documents is not False:
        for one in results:
            one.document = RankedText(documents[one.index])
    return JSONPieces(Ranking(id=head.id, model=head.model, usage=usage, results=results))


async def _scores(request: Request, body: ScoringFields, texts: _Texts) -> tuple[Head, list[float], EmbeddingUsage]:
    """Return the head of the answer, a score for each document, and the number of tokens."""
    server: Server = request.app.state.server
    head = Head.new("score", server.base_name(body.model), body.request_id)
    model = pooled.pooled_model(server)
    check_scores(model, body.instruction)
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        limit = getattr(body, name)
        if limit is not None and limit < 0:
            raise RequestError(name, limit, "must be at least 0; 0 keeps all tokens")
    names = {"prompt": texts.document_name, "prompt_token_ids": texts.document_name, "normalize": "use_activation"}
    with generation.named_as_sent(names | {"activation": "use_activation"}):
        if model.task == "embed":
            if body.use_activation is False:
                raise RequestError("use_activation", False, "is for classifiers: a cosine has no activation")
            work = _cosines(server, body, texts, head)
        else:
            if body.truncate_prompt_tokens is not None:
                accepted = "a pair of texts has no end to cut: send max_tokens_per_query and max_tokens_per_doc"
                raise RequestError("truncate_prompt_tokens", body.truncate_prompt_tokens, accepted)
            work = _pair_scores(server, body, texts, head, model.pairs)
        scores, usage = await until_disconnect(request.receive, work)
    return head, scores, usage


async def _cosines(
    server: Server, body: ScoringFields, texts: _Texts, head: Head
) -> tuple[list[float], EmbeddingUsage]:
    params = pooled.pooling_params(body, task="embed")

    def cut(cancelled: Callable[[], bool]) -> list[Prompt]:
        sides = (
            (texts.query_name, texts.queries, body.max_tokens_per_query),
            (texts.document_name, texts.documents, body.max_tokens_per_doc),
        )
        return [_cut(server, name, one, most, None, cancelled) for name, some, most in sides for one in some]

    prompts = salted(await server.tokenising.run(texts.length, cut), body.cache_salt)
    finals = await pooled.pooled(server, prompts, params, head.request_id, body.priority or 0)
    scores, first = [], len(texts.queries)
    query = np.zeros(0, np.float32)
    for index in range(len(texts.documents)):
        if index < first:
            query = np.array(finals[index].outputs.embedding, np.float32)
        scores.append(float(query @ np.array(finals[first + index].outputs.embedding, np.float32)))
        await asyncio.sleep(0)  # a pair of embeddings takes up to 1 ms
    return scores, pooled.usage(finals)


async def _pair_scores(
    server: Server, body: ScoringFields, texts: _Texts, head: Head, pairs: PairFormat
) -> tuple[list[float], EmbeddingUsage]:
    params = pooled.pooling_params(body, task="classify", activation=body.use_activation is not False)
    tokenizer = server.engine.get_tokenizer()

    def tokenise(cancelled: Callable[[], bool]) -> list[Prompt]:
        # Each text is first tokenised alone, in pieces, so that a too long text is refused early.
        limit = pooled.prompt_limit(server, body)
        made: list[Prompt] = []
        most = body.max_tokens_per_query
        queries = [_cut(server, texts.query_name, one, most, limit, cancelled) for one in texts.queries]
        for index, document in enumerate(texts.documents):
            document = _cut(server, texts.document_name, document, body.max_tokens_per_doc, limit, cancelled)
            made.append(pair_prompt(tokenizer, pairs, queries[index % len(queries)], document, body.instruction))
        return made

    prompts = salted(await server.tokenising.run(texts.length, tokenise), body.cache_salt)
    finals = await pooled.pooled(server, prompts, params, head.request_id, body.priority or 0)
    return [final.outputs.probs[0] for final in finals.values()], pooled.usage(finals)


def _cut(
    server: Server, name: str, text: str, most: int | None, limit: TokenLimit | None, cancelled: Callable[[], bool]
) -> str:
    """Return the text of the first `most` tokens. Without `most`, raise RequestError for more tokens than `limit`."""
    if not most and limit is None:
        return text
    tokenizer = server.engine.get_tokenizer()
    ids = plain_ids(tokenizer, name, text, TokenLimit(most, "right") if most else limit, cancelled)
    return tokenizer.decode(ids[:most]) if most and len(ids) > most else text
