"""Options of the demo model for tests of its server."""

SIZES = {
    "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64, "row_buckets": (8,), "token_buckets": (64,),
}  # fmt: skip
