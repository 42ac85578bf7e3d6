"""Families with attention and recurrent layers: Nemotron-H and Falcon-H1. `mamba` is for Granite 4 as well."""
