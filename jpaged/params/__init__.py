"""Parameter types of requests and of logits processors. Each class checks its values when it is created."""
