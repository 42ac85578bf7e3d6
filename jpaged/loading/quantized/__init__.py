"""Readers of quantised Hugging Face checkpoints, one file a format. They run on the host, with numpy."""
