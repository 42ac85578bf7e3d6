"""The old path of `jpaged.serving.web.keys`, until the next release."""

from jpaged.serving.web.keys import read_key_file, read_keys

__all__ = ["read_key_file", "read_keys"]
