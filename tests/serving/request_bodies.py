"""A request body for each route that asks the engine for work."""

import json

# A new route belongs here, or into ASK_NOTHING of test_disconnect.py.
GENERATE = {
    "/v1/completions": {"prompt": "never ends", "max_tokens": 3000},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "never ends"}], "max_tokens": 3000},
    "/invocations": {"prompt": "never ends", "max_tokens": 3000},
    "/v1/responses": {"input": "never ends", "max_output_tokens": 3000},
    "/v1/messages": {"messages": [{"role": "user", "content": "never ends"}], "max_tokens": 3000},
}
SCORE, RERANK = {"text_1": "never", "text_2": "ends"}, {"query": "never", "documents": ["ends"]}
POOL = {
    "/v1/embeddings": {"input": "never ends"}, "/pooling": {"input": "never ends"},
    "/classify": {"input": "never ends"},
    "/score": SCORE, "/v1/score": SCORE, "/rerank": RERANK, "/v1/rerank": RERANK, "/v2/rerank": RERANK,
}  # fmt: skip
TALKS = [[{"role": "user", "content": text}] for text in ("never", "ends")]
OTHERS = {
    "/v1/chat/completions/batch": {"messages": TALKS, "max_tokens": 3000},
    "/inference/v1/generate": {"token_ids": [101, 102], "sampling_params": {"max_tokens": 3000}},
}
BODIES = GENERATE | POOL | OTHERS
STREAMS = sorted(GENERATE)


def at_most(path: str, num_tokens: int) -> dict:
    """Return the body of a generating route with this limit."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return GENERATE[path] | {limit: num_tokens}


def request_bytes(path: str, body: dict) -> bytes:
    """Return a whole HTTP request."""
    raw = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(raw), raw)
