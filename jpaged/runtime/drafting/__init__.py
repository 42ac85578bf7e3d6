"""Device drafters: models that propose tokens, with KV pages of their own."""
