"""Flags: groups that commands have as a field, where they come from, and their order in `--help`. No command."""
