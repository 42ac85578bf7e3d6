"""Decides which requests run in a step, and with how many tokens."""
