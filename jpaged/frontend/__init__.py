"""Code shared by `LLM`, `AsyncLLM`, the server and the command line."""
