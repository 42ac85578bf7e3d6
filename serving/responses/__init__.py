"""/v1/responses: converts its requests to chats, and their answers to items and events."""
