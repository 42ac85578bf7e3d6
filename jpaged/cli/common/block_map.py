"""Prints a snapshot of the engine: totals, the request table, the queue, and one character per block."""

import colorsys
import dataclasses
import string
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jpaged.snapshot import BlockSnapshot, EngineSnapshot, RequestSnapshot

BLOCKS_A_LINE = 64
EMPTY, CACHED, MANY = ".", "-", "+"  # MANY: a block with 10 owners or more
MARKS = string.ascii_letters
GOLDEN = 0.618034  # step from one hue to the next, as a fraction of the colour circle: any number of hues differ

Colour = tuple[float, float, float]  # red, green, blue in [0, 1]


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """A request's letter in the terminal, and its colour in the terminal and in the picture."""

    mark: str
    colour: Colour

    def shade(self, sample: int) -> Colour:
        """Return the colour of a parallel sample. Each sample is lighter than the one before."""
        return lighter(self.colour, min(0.2 * sample, 0.6))


def looks(snapshot: EngineSnapshot) -> dict[str, Look]:
    """Return the look of each request that owns blocks, by request id: running requests first, then waiting ones."""
    ids = dict.fromkeys(r.request_id for r in (*snapshot.running, *snapshot.waiting) if r.num_blocks)
    return {
        request_id: Look(MARKS[i % len(MARKS)], colorsys.hsv_to_rgb((0.58 + i * GOLDEN) % 1, 0.7, 0.85 - 0.2 * (i % 2)))
        for i, request_id in enumerate(ids)
    }


def lighter(colour: Colour, share: float) -> Colour:
    """Mix a colour with white. share: the fraction of white."""
    red, green, blue = (part + (1 - part) * share for part in colour)
    return red, green, blue


def summary(snapshot: EngineSnapshot) -> list[str]:
    """Describe the KV pool in up to three lines."""
    pool = snapshot.pool
    lines = [
        f"KV pool: {pool.used_blocks:,} of {pool.num_blocks:,} blocks of {pool.block_size} tokens used "
        f"({pool.used_blocks / pool.num_blocks:.0%}), {pool.cached_blocks:,} cached, {pool.empty_blocks:,} empty"
    ]
    if pool.used_blocks:
        filled = pool.used_tokens / (pool.used_blocks * pool.block_size)
        lines += [
            f"{pool.shared_blocks:,} have several owners: without sharing, {pool.references:,} blocks would be used",
            f"{1 - filled:.1%} of the slots in used blocks hold no token yet",
        ]
    return lines


def speculation_lines(snapshot: EngineSnapshot) -> list[str]:
    """Describe speculative decoding in one line; none if the engine does not speculate."""
    stats = snapshot.stats.speculation
    if stats is None:
        return []
    line = f"speculation: {stats.drafts_per_row:.1f} drafts per row now, at most {stats.num_speculative_tokens}"
    if stats.drafts:
        line += f"; {stats.acceptance_rate:.1%} of {stats.draft_tokens:,} drafts accepted, "
        line += f"{stats.tokens_per_draft:.2f} tokens per row and step with drafts"
    return [line]


def wrong_counts(snapshot: EngineSnapshot) -> list[str]:
    """Describe each block whose reference count differs from its number of owners, which is a bug of the engine."""
    return [
        f"block {block.block}: reference count {block.ref_count}, but {len(block.owners)} block tables contain it"
        for block in snapshot.blocks
        if block.ref_count != len(block.owners)
    ]


def show(snapshot: EngineSnapshot, out: Console) -> None:
    """Print the whole snapshot."""
    known = looks(snapshot)
    for line in (*summary(snapshot), f"step {snapshot.step:,}, weights of version {snapshot.weight_version}"):
        out.print(Text(line))
    for line in speculation_lines(snapshot):
        out.print(Text(line))
    for line in wrong_counts(snapshot):
        out.print(Text(f"the engine's state is inconsistent: {line}", style="bold red"))
    out.print(Text(f"\n{len(snapshot.running)} running, {len(snapshot.waiting)} waiting", style="bold"))
    if snapshot.running or snapshot.waiting:
        out.print(_requests([*snapshot.running, *snapshot.waiting], known))
    out.print(Text("blocks", style="bold"))
    for line in block_lines(snapshot, known):
        out.print(line)
    out.print(
        Text(f"letter: the owner   2 to 9: number of owners   {MANY}: 10 or more   {CACHED}: cached   {EMPTY}: empty")
    )


def block_lines(snapshot: EngineSnapshot, known: dict[str, Look]) -> list[Text]:
    """Draw one character per block, BLOCKS_A_LINE per line. Consecutive lines without owners become one line."""
    lines: list[Text] = []
    free: list[BlockSnapshot] = []
    for start in range(0, len(snapshot.blocks), BLOCKS_A_LINE):
        blocks = snapshot.blocks[start : start + BLOCKS_A_LINE]
        if not any(block.ref_count for block in blocks):
            free += blocks
            continue
        lines += _free_lines(free)
        free = []
        line = Text(f"{start:>8,}  ")
        for block in blocks:
            line.append_text(_character(block, known))
        lines.append(line)
    return lines + _free_lines(free)


def _free_lines(blocks: Sequence[BlockSnapshot]) -> list[Text]:
    if not blocks:
        return []
    cached = sum(block.prefix_hash is not None for block in blocks)
    return [Text(f"{blocks[0].block:>8,}  {cached:,} cached, {len(blocks) - cached:,} empty", style="dim")]


def _character(block: BlockSnapshot, known: dict[str, Look]) -> Text:
    if not block.ref_count:
        return Text(CACHED if block.prefix_hash is not None else EMPTY, style="dim")
    owner = block.owners[0].request_id if block.owners else ""
    look = known.get(owner, Look("?", (0.5, 0.5, 0.5)))
    if block.ref_count == 1:
        return Text(look.mark, style=_style(look.colour))
    return Text(str(block.ref_count) if block.ref_count < 10 else MANY, style=f"reverse {_style(look.colour)}")


def _requests(requests: Sequence[RequestSnapshot], known: dict[str, Look]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("")
    table.add_column("request", overflow="fold")
    has_adapters = any(request.adapter is not None for request in requests)
    names = ("status", "row", "priority", "tokens", "computed", "cached", "blocks", "preempted", "age")
    for name in (*names, "adapter") if has_adapters else names:
        table.add_column(name, justify="left" if name in ("status", "adapter") else "right")
    for request in requests:
        look = known.get(request.request_id)
        sample = f" #{request.sample}" if request.sample else ""
        table.add_row(
            Text(look.mark, style=_style(look.colour)) if look else "",
            Text(request.request_id + sample),
            request.status,
            "" if request.row is None else str(request.row),
            str(request.priority),
            f"{request.prompt_tokens:,} + {request.output_tokens:,}",
            f"{request.computed_tokens:,}",
            f"{request.cached_tokens:,}",
            f"{request.num_blocks:,}",
            f"{request.preemptions:,}",
            f"{request.age_seconds:.1f} s",
            *([Text(request.adapter or "")] if has_adapters else []),
        )
    return table


def _style(colour: Colour) -> str:
    red, green, blue = (round(part * 255) for part in colour)
    return f"rgb({red},{green},{blue})"
