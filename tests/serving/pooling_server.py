"""A server of a tiny pooling model, and the vectors of the fake engine."""

import numpy as np

from jpaged import AsyncLLM
from jpaged.serving.application import create_app
from jpaged.serving.server_state import Server
from tests.support.http_server import running

OPTIONS = {"dtype": "float32", "token_buckets": (64,), "max_num_seqs": 8, "max_num_batched_tokens": 64}


def third(*ids):
    """Return the fake engine's vector of a prompt."""
    return (np.float32(ids) + np.float32(1 / 3)).tolist()


def served(folder, **options):
    """Serve a checkpoint. The context manager yields the base URL."""
    engine = AsyncLLM(str(folder), **OPTIONS | options)
    return running(create_app(Server(engine=engine, model_names=("tiny",))))
