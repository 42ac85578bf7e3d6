"""The OpenAI-compatible HTTP server. Imported as `jpaged.serving`.

The path of a request:

1. `application` routes it, after `web.auth` has checked its key.
2. `web.body` reads the JSON and checks it against a struct of `schemas`.
3. A `routes` module of `openai_api`, `responses`, `messages` or `files` makes prompts and sampling parameters, and
   passes them to the engine, described by `engine_client`. `admin` has the routes of the operator.
4. The answer is a struct of `schemas`; `web.sse` writes a stream. `web.disconnect` aborts the request if the client
   disconnects.
5. `web.error_responses` turns an error into the API's error body.

Imports run one way: `application` -> `admin`, `files`, `responses`, `messages` -> `openai_api` -> `web` -> `schemas`.
`app` and `app_options` start the application. Every folder imports `engine_client` and `server_state`.
"""
