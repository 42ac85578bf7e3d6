"""Flags that commands share, where they come from, and how they are grouped in `--help`. No command."""
