"""Parses answers of chat models into reasoning, content and tool calls: piece by piece, in linear time."""
