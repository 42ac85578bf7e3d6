"""Chats: render a conversation as a prompt, and read the answer."""
