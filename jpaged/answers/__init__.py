"""Answers of chat models, read: reasoning, content and tool calls out of the text, piece by piece, in linear time."""
