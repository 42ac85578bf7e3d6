"""Several devices: pipeline stages, and processes that run one engine together."""
