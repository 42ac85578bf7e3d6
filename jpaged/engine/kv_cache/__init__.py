"""Blocks of the KV cache: allocation, block tables, prefix sharing, the host tier."""
