"""The OpenAI-compatible HTTP server. Imported as `jpaged.serving`.

The path of a request:

1. `application` routes it, after `auth` has checked its key.
2. `body` reads the JSON and checks it against `request_schema`.
3. `routes_*` make prompts and sampling parameters, and pass them to the engine, described by `engine_client`.
4. `response_schema` writes the answer, `sse` a stream. `disconnect` aborts the request if the client disconnects.
5. `error_responses` turns an error into OpenAI's error body.
"""
