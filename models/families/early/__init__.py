"""Families from before Llama: GPT-2, GPT-NeoX, OPT, Falcon and Bloom."""
