"""Turns sampled tokens into outputs: text, ends, log-probabilities."""
