"""Pairs of texts: the prompt from which a cross-encoder scores how well a document fits a query."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jpaged.errors import RequestError
from jpaged.params.pooling import PairFormat, PooledModel

# Qwen3-Reranker's model card has these texts.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def check_scores(model: PooledModel, instruction: str | None) -> None:
    """Raise RequestError if the model has no score for a pair of texts, or takes no instruction."""
    if model.task != "embed" and model.size != 1:
        accepted = (
            f"is a classifier of {model.size} labels: scores need an embedding model, or a classifier with one label"
        )
        raise RequestError("model", ", ".join(model.labels), accepted)
    if instruction and model.pairs is not PairFormat.QWEN3:
        raise RequestError("instruction", instruction, "the model takes none: leave it out")


def pair_prompt(
    tokenizer: Any, pairs: PairFormat, query: str, document: str, instruction: str | None = None
) -> dict[str, Any]:
    """The prompt for a query and a document. tokenizer: a transformers tokenizer."""
    if pairs is PairFormat.QWEN3:
        text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        return {"prompt_token_ids": list(tokenizer(_BEFORE + text + _AFTER, verbose=False)["input_ids"])}
    encoded = tokenizer(query, text_pair=document, verbose=False)
    prompt = {"prompt_token_ids": list(encoded["input_ids"])}
    if pairs is PairFormat.TYPED and "token_type_ids" in encoded:
        prompt["token_type_ids"] = list(encoded["token_type_ids"])
    return prompt


def text_pairs(query: str | Sequence[str], documents: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Queries and documents of equal number: one query is for all documents. Raises RequestError."""
    queries, others = _texts("query", query), _texts("documents", documents)
    if len(queries) not in (1, len(others)):
        accepted = f"must be one text, or one for each of the documents ({len(others)})"
        raise RequestError("query", f"{len(queries)} texts", accepted)
    return queries * (len(others) if len(queries) == 1 else 1), others


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    """A text, or a list of texts, as a list. Raises RequestError for anything else."""
    is_list = isinstance(given, Iterable) and not isinstance(given, (str, Mapping))
    texts: list[Any] = list(given) if is_list else [given]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(name, given, "must be a text, or a list of texts, none of them empty")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            accepted = f"is not valid Unicode: {error.reason} at character {error.start}"
            raise RequestError(name, text, accepted) from None
    return texts
