"""The OpenAI-compatible HTTP server. Imported as `jpaged.serving`.

How a request goes through: `application` routes it; `body` reads and checks the JSON against `request_schema`;
`routes_*` make prompts and sampling parameters of it and hand them to the engine (`engine_client` says what that must
offer); answers are written by `response_schema`, streams by `sse`; `disconnect` notices a client that went away, and
`error_responses` turns errors into OpenAI's error body.
"""
