"""The version: the one place where it stands; the build reads it from here."""

__version__ = "0.1.0"
