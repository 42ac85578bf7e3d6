"""Checks prompts and parameters, and makes requests from them."""
