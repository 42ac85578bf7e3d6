"""Routes that replace the weights of a running server, and that show their version."""
