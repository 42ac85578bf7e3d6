"""What is done to blocks between steps: copy-on-write, and the way to the host tier and back.

Programs of their own, compiled before ready and run only when there is something to do: inside the step they would cost
a kernel a layer every time. The device runs them in the order of dispatch, so a block is copied after the step that
wrote it and before the one that goes on in the copy, and nobody waits.

A block on the host is one array [page arrays, page] in pinned memory where the back end has that, of numpy elsewhere.
"""

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.engine.step_plan import BlockMove, TransferCosts
from jpaged.errors import ModelLoadError
from jpaged.runtime.state import DeviceState, formats
from pallas_kernels import KVPages

logger = logging.getLogger(__name__)

COPY_BUCKETS = (8, 64)  # blocks that one program copies: what a step's forks need, and a wide beam search
HOST_BUCKET = 16        # blocks that go to the host, or come back, in one program
PINNED = "pinned_host"


def host_slots(swap_space: float, block_bytes: int) -> int:
    """Blocks that `swap_space` GiB of host memory hold. Raises ModelLoadError where the machine has less memory."""
    if not 0 <= swap_space < float("inf"):
        raise ModelLoadError(f"swap_space={swap_space}: must be GiB of host memory, from 0")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if swap_space * 2**30 > total:
        raise ModelLoadError(
            f"swap_space={swap_space}: this machine has {total / 2**30:.1f} GiB of memory in all; lower it"
        )
    slots = int(swap_space * 2**30) // block_bytes
    if swap_space and not slots:
        raise ModelLoadError(f"swap_space={swap_space}: one block takes {block_bytes / 2**30:.4f} GiB; raise it, or 0")
    return slots


class BlockMover:
    """The programs, and the blocks on the host."""

    def __init__(self, state: DeviceState, sharding: jax.sharding.SingleDeviceSharding, *, host_slots: int):
        """Compile the programs for a state of these shapes."""
        self.num_programs = len(COPY_BUCKETS) + (2 if host_slots else 0)
        self._sharding = sharding
        (device,) = sharding.device_set
        pinned = any(memory.kind == PINNED for memory in device.addressable_memories())
        self._host_sharding = sharding.with_memory_kind(PINNED) if pinned else None
        self._host: dict[int, Any] = {}  # slot -> pages of one block, stacked over the arrays

        def compiled(function: Callable[..., Any], rows: tuple[int, ...], *args: Any, donate: bool = True) -> Any:
            index = jax.ShapeDtypeStruct(rows, np.dtype(np.int32), sharding=sharding)
            jitted = jax.jit(function, donate_argnums=0, out_shardings=formats(state)) if donate else jax.jit(function)
            return jitted.lower(state if donate else state.pages, index, *args).compile()

        self._copies = {size: compiled(_copy, (size, 2)) for size in COPY_BUCKETS}
        if host_slots:
            block = jax.eval_shape(_take, state.pages, np.zeros(HOST_BUCKET, np.int32))[0]
            block = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), block)
            self._take = compiled(_take, (HOST_BUCKET,), donate=False)
            self._put = compiled(_put, (HOST_BUCKET,), (block,) * HOST_BUCKET)

    def run(self, state: DeviceState, moves: np.ndarray) -> DeviceState:
        """Do moves (int32[M, 3]: BlockMove, from, to) in their order; `state` is donated."""
        for kind, run in _runs(moves.tolist()):
            match kind:
                case BlockMove.COPY:
                    state = self._copy(state, run)
                case BlockMove.TO_HOST:
                    for part in _parts(run, HOST_BUCKET):
                        self._to_host(state, part)
                case BlockMove.TO_DEVICE:
                    for part in _parts(run, HOST_BUCKET):
                        state = self._to_device(state, part)
        return state

    def measure(
        self, state: DeviceState, block_bytes: int, step: Callable[[DeviceState], DeviceState], num_tokens: int
    ) -> tuple[DeviceState, TransferCosts]:
        """How long moving a block takes here, and computing a token. step: one that computes so many tokens."""

        def seconds(work: Callable[[DeviceState], DeviceState]) -> tuple[DeviceState, float]:
            nonlocal state
            times = []
            for _ in range(4):
                began = time.perf_counter()
                state = jax.block_until_ready(work(state))
                times.append(time.perf_counter() - began)
            return state, statistics.median(times[1:])

        blocks = [(BlockMove.TO_HOST, i, i) for i in range(HOST_BUCKET)]
        back = [(BlockMove.TO_DEVICE, i, i) for i in range(HOST_BUCKET)]
        state, moving = seconds(lambda s: self.run(s, np.array([*blocks, *back])))
        state, computing = seconds(step)
        self._host.clear()
        costs = TransferCosts(moving / (2 * HOST_BUCKET), computing / num_tokens)
        logger.info(
            "host tier: a block (%.1f KiB) moves in %.0f us, a token is computed in %.0f us",
            block_bytes / 1024, costs.seconds_per_move * 1e6, costs.seconds_per_token * 1e6,
        )  # fmt: skip
        if not costs.keeping_pays(state.pages[0].block_size):
            logger.warning("swap_space: computing a block's tokens takes less time here than moving it; it is not used")
        return state, costs

    def close(self) -> None:
        """Let go of the host's blocks."""
        self._host.clear()

    def _copy(self, state: DeviceState, run: Sequence[tuple[int, int]]) -> DeviceState:
        for part in _parts(run, COPY_BUCKETS[-1]):
            size = next(size for size in COPY_BUCKETS if size >= len(part))
            from_to = np.full((size, 2), -1, np.int32)
            from_to[: len(part)] = part
            state = self._copies[size](state, jax.device_put(from_to, self._sharding))
        return state

    def _to_host(self, state: DeviceState, part: Sequence[tuple[int, int]]) -> None:
        index = np.zeros(HOST_BUCKET, np.int32)
        index[: len(part)] = [block for block, _ in part]
        taken = self._take(state.pages, jax.device_put(index, self._sharding))
        for (_, slot), block in zip(part, taken, strict=False):
            self._host[slot] = jax.tree.map(self._held, block)

    def _held(self, array: jax.Array) -> Any:
        return np.asarray(array) if self._host_sharding is None else jax.device_put(array, self._host_sharding)

    def _to_device(self, state: DeviceState, part: Sequence[tuple[int, int]]) -> DeviceState:
        index = np.full(HOST_BUCKET, -1, np.int32)
        index[: len(part)] = [block for _, block in part]
        slots = [slot for slot, _ in part]
        blocks = [jax.device_put(self._host[slot], self._sharding) for slot in slots]
        blocks += [blocks[0]] * (HOST_BUCKET - len(blocks))
        return self._put(state, jax.device_put(index, self._sharding), tuple(blocks))


def _copy(state: DeviceState, from_to: jax.Array) -> DeviceState:
    return state.replace(pages=tuple(pages.copy_blocks(from_to) for pages in state.pages))


def _take(pages: tuple[KVPages, ...], blocks: jax.Array) -> tuple[Any, ...]:
    """Each of the blocks by itself, stacked over the page arrays."""
    taken = [each.take_blocks(blocks) for each in pages]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays, axis=1), *taken)
    return tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(len(blocks)))


def _put(state: DeviceState, blocks: jax.Array, contents: tuple[Any, ...]) -> DeviceState:
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *contents)
    pages = [
        each.put_blocks(blocks, jax.tree.map(lambda x, i=i: x[:, i], stacked)) for i, each in enumerate(state.pages)
    ]
    return state.replace(pages=tuple(pages))


def _runs(moves: Sequence[Sequence[int]]) -> Iterator[tuple[BlockMove, list[tuple[int, int]]]]:
    """Moves that may be done at once, in order: of one kind, none of which reads or writes what one before it wrote."""
    run: list[tuple[int, int]] = []
    written: set[int] = set()
    last: BlockMove | None = None
    for number, source, target in moves:
        kind = BlockMove(number)
        reads_written = kind is BlockMove.COPY and source in written
        if last is not None and (kind is not last or reads_written or target in written):
            yield last, run
            run, written = [], set()
        last = kind
        run.append((source, target))
        written.add(target)
    if last is not None:
        yield last, run


def _parts(run: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
    return (run[start : start + size] for start in range(0, len(run), size))
