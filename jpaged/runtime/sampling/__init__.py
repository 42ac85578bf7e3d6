"""From logits to tokens, on one or several devices."""
