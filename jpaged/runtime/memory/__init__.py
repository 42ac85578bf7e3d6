"""Bytes: what fits on a device, what a program needs, what sleeps on the host, and what to do when it is too much."""
