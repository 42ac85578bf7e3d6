"""Runs in a step: its inputs, the forward pass, the programs after it, and the moves of blocks."""
