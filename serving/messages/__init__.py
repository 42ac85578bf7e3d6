"""/v1/messages, the API of Anthropic: converts its requests to chats, and their answers to blocks and events."""
