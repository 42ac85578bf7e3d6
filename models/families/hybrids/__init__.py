"""Families with attention and recurrent layers. `mamba` has what those with Mamba-2 share, Granite 4 too."""
