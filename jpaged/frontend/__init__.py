"""Parts that the front doors `LLM`, `AsyncLLM`, the server and the command line share."""
