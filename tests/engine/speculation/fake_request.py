"""A request as the host side of a model drafter sees it."""

import types

from jpaged.engine.kv_cache.block_table import BlockTable, KVState

BLOCK = 4  # tokens of a block


class FakeRequest:
    """Tokens, a row and a block table."""

    def __init__(self, prompt, row, blocks=()):
        self.token_ids = list(prompt)
        self.schedule = types.SimpleNamespace(row=row)
        self.kv = KVState(b"root", block_tables=[BlockTable([]), BlockTable(list(blocks))])

    def grow(self, num_tokens, free):
        """Name the full blocks of known tokens, and allocate blocks for `num_tokens` tokens."""
        self.kv.names(self.token_ids, len(self.token_ids) // BLOCK, BLOCK)
        blocks = self.kv.block_tables[1].blocks
        while len(blocks) * BLOCK < num_tokens:
            blocks.append(free.pop(0))
