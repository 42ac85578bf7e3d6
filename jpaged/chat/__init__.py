"""Renders a conversation as a prompt, and prepares the reader of its answers."""
