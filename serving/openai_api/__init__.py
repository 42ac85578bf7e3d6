"""Completions, chats, embeddings, scores and models of the OpenAI API, and what the other APIs share with it."""
