"""From logits to tokens, on one device or on several."""
