"""Flags that commands share, their order in `--help`, and the steps that rewrite a command line before parsing."""
