"""Text to token ids, for texts of any length."""
