"""Moves between steps: copy on write, transfers to and from the host tier, and copies of recurrent state.

Moves are separate programs, compiled before ready and run only when needed. Inside a forward program they would add one
kernel per layer to every step. The device runs programs in the order of dispatch: a block is copied after the step that
wrote it, and before the step that continues in the copy. Without pinned memory, the host waits for blocks it downloads.
"""

import dataclasses
import functools
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jpaged.engine.step_plan import BlockMove, TransferCosts
from jpaged.errors import ModelLoadError
from jpaged.runtime.kv_format import FP8
from jpaged.runtime.placement import Placement
from jpaged.runtime.state import DeviceState, formats
from jpaged.runtime.store.stored_programs import ProgramStore, compile_program
from pallas_kernels import KVPages
from pallas_kernels.set_rows import set_rows

logger = logging.getLogger(__name__)

COPY_BUCKETS = (8, 64)  # blocks per copy program: 8 for the forks of a step, 64 for a wide beam search
STATE_BUCKET = 4  # states per program that copies them. Each has megabytes in a large model
HOST_BUCKET = 16  # blocks per program that moves them to the host or back
PINNED = "pinned_host"

# A pytree like KVPages of one block, stacked over the page arrays. On the host its leaves are jax.Arrays in pinned
# memory. Without pinned memory they are numpy arrays, or jax.Arrays if there is a mesh.
HostBlock = Any


def host_slots(swap_space: float, block_bytes: int) -> int:
    """Number of blocks in `swap_space` GiB of host memory. Raises ModelLoadError if it exceeds RAM or fits no block."""
    if not 0 <= swap_space < float("inf"):
        raise ModelLoadError(f"swap_space={swap_space}: must be GiB of host memory, at least 0")
    if not swap_space:
        return 0
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if swap_space * 2**30 > total:
        raise ModelLoadError(
            f"swap_space={swap_space}: this machine has {total / 2**30:.1f} GiB of memory in all; lower it"
        )
    slots = int(swap_space * 2**30) // block_bytes
    if not slots:
        raise ModelLoadError(f"swap_space={swap_space}: a block has {block_bytes / 2**30:.4f} GiB; raise it, or set 0")
    return slots


class BlockMover:
    """Runs block moves, and stores the blocks of the host tier."""

    def __init__(
        self, state: DeviceState, placement: Placement, *, host_slots: int, handover: bool = False,
        store: ProgramStore | None = None,
    ):  # fmt: skip
        """Compile the programs for states of these shapes.

        host_slots: 0 = no host tier. handover: `read` and `write` are needed. store: see `compile_program`.
        """
        self._placement = placement
        # axis 2 is the KV heads, of a page array and of a `HostBlock`
        self._block_sharding = placement.of_pages(latent=state.page_v_dim is not None)
        self._host_sharding = _pinned(self._block_sharding)
        self._host: dict[int, HostBlock] = {}  # by host slot

        def moving(function: Callable[..., DeviceState], *arguments: Any) -> jax.stages.Compiled:
            call = placement.on_each_device(functools.partial(function), (state, *arguments), state)
            return compile_program(
                call, (state, *arguments), donate=(0,), out_shardings=formats(state), store=store
            )

        self._copies = {size: moving(_copy, placement.shape((size, 2), np.int32)) for size in COPY_BUCKETS}
        if state.recurrent:
            self._copy_states = moving(_copy_states, placement.shape((STATE_BUCKET, 2), np.int32))
        if host_slots or handover:
            index = placement.shape((HOST_BUCKET,), np.int32)
            blocks = jax.tree.map(self._placed, jax.eval_shape(_take, state.pages, index))
            call = placement.on_each_device(functools.partial(_take), (state.pages, index), blocks)
            self._take = compile_program(call, (state.pages, index), donate=(), store=store)
            self._put = moving(_put, index, blocks)
            self._block = blocks[0]

    def run(self, state: DeviceState, moves: np.ndarray) -> DeviceState:
        """Run moves in order: int32[M, 3] of (BlockMove, from, to). Donates `state`."""
        for kind, run in _runs(moves.tolist()):
            match kind:
                case BlockMove.COPY:
                    state = self._copy(state, run)
                case BlockMove.STATE:
                    for part in _parts(run, STATE_BUCKET):
                        state = self._copy_states(state, self._placement.put(_padded(part, STATE_BUCKET)))
                case BlockMove.TO_HOST:
                    for part in _parts(run, HOST_BUCKET):
                        self._to_host(state, part)
                case BlockMove.TO_DEVICE:
                    for part in _parts(run, HOST_BUCKET):
                        state = self._to_device(state, part)
        return state

    @property
    def block_arrays(self) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
        """Shape and dtype of each array of a block, as `read` returns them."""
        return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self._block))

    def read(self, state: DeviceState, blocks: Sequence[int]) -> list[tuple[np.ndarray, ...]]:
        """Download the arrays of blocks. Waits for the device."""
        found = []
        for part in _parts(list(zip(blocks, blocks, strict=True)), HOST_BUCKET):
            found += [tuple(map(np.asarray, jax.tree.leaves(block))) for block in self._taken(state, part)]
        return found

    def write(
        self, state: DeviceState, blocks: Sequence[int], contents: Sequence[tuple[np.ndarray, ...]]
    ) -> DeviceState:
        """Write arrays from `read` into blocks. Donates `state`."""
        structure = jax.tree.structure(self._block)
        trees = [jax.tree.unflatten(structure, arrays) for arrays in contents]
        for part in _parts(list(zip(blocks, trees, strict=True)), HOST_BUCKET):
            state = self._write(state, part)
        return state

    def measure(
        self, state: DeviceState, block_bytes: int, step: Callable[[DeviceState], DeviceState], num_tokens: int
    ) -> tuple[DeviceState, TransferCosts]:
        """Measure the time to move a block and to compute a token. step: computes `num_tokens` tokens."""

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
            "host tier: moving a block (%.1f KiB) takes %.0f us, computing a token %.0f us",
            block_bytes / 1024, costs.seconds_per_move * 1e6, costs.seconds_per_token * 1e6,
        )  # fmt: skip
        if not costs.keeping_pays(state.pages[0].block_size):
            logger.warning("swap_space is not used: computing a block's tokens takes less time here than moving it")
        return state, costs

    def _placed(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._block_sharding)

    def close(self) -> None:
        """Free the blocks of the host tier."""
        self._host.clear()

    def _copy(self, state: DeviceState, run: Sequence[tuple[int, int]]) -> DeviceState:
        for part in _parts(run, COPY_BUCKETS[-1]):
            size = next(size for size in COPY_BUCKETS if size >= len(part))
            state = self._copies[size](state, self._placement.put(_padded(part, size)))
        return state

    def _to_host(self, state: DeviceState, part: Sequence[tuple[int, int]]) -> None:
        for (_, slot), block in zip(part, self._taken(state, part), strict=True):
            self._host[slot] = jax.tree.map(self._to_host_memory, block)

    def _taken(self, state: DeviceState, part: Sequence[tuple[int, Any]]) -> Sequence[HostBlock]:
        """Copies of at most HOST_BUCKET blocks, on the device. part: (block, anything) entries."""
        index = np.zeros(HOST_BUCKET, np.int32)
        index[: len(part)] = [block for block, _ in part]
        return self._take(state.pages, self._placement.put(index))[: len(part)]

    def _to_host_memory(self, array: jax.Array) -> jax.Array | np.ndarray:
        if self._host_sharding is not None:
            return jax.device_put(array, self._host_sharding)
        return np.asarray(array) if self._placement.mesh is None else array  # a mesh of CPU devices

    def _to_device(self, state: DeviceState, part: Sequence[tuple[int, int]]) -> DeviceState:
        return self._write(state, [(block, self._host[slot]) for slot, block in part])

    def _write(self, state: DeviceState, part: Sequence[tuple[int, HostBlock]]) -> DeviceState:
        index = np.full(HOST_BUCKET, -1, np.int32)
        index[: len(part)] = [block for block, _ in part]
        contents = [jax.device_put(content, self._block_sharding) for _, content in part]
        contents += [contents[0]] * (HOST_BUCKET - len(contents))
        return self._put(state, self._placement.put(index), tuple(contents))


def _pinned(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    """The sharding in pinned host memory; None if the backend has none."""
    if sharding is None:
        return None
    device = next(iter(sharding.addressable_devices), None)
    pinned = device is not None and any(memory.kind == PINNED for memory in device.addressable_memories())
    return sharding.with_memory_kind(PINNED) if pinned else None


def _copy(state: DeviceState, from_to: Int[Array, "copies 2"]) -> DeviceState:
    return state.with_pages(pages.copy_blocks(from_to) for pages in state.pages)


def _copy_states(state: DeviceState, from_to: Int[Array, "copies 2"]) -> DeviceState:
    """Copy slots from_to[i, 0] to from_to[i, 1] of all recurrent layers, reading all first. -1 is padding."""

    def copied(slots: Array) -> Array:
        target = jnp.where(from_to[:, 1] < 0, slots.shape[0], from_to[:, 1])
        rows = jnp.take(slots, from_to[:, 0], axis=0, mode="clip")
        return set_rows(
            slots, target, rows.reshape(len(from_to), -1), plain=lambda own: own.at[target].set(rows, mode="drop")
        )

    return state.replace(recurrent=jax.tree.map(copied, state.recurrent))


def _padded(part: Sequence[tuple[int, int]], size: int) -> np.ndarray:
    """int32[size, 2]: the pairs of `part`, then pairs of -1."""
    from_to = np.full((size, 2), -1, np.int32)
    from_to[: len(part)] = part
    return from_to


def _take(pages: tuple[KVPages, ...], blocks: Int[Array, " blocks"]) -> tuple[HostBlock, ...]:
    """One `HostBlock` per block. Blocks of int8 pages include their scales."""
    taken = [each.take_blocks(blocks) for each in pages]
    if pages[0].dtype == FP8:  # static scales are not per block
        taken = [dataclasses.replace(each, scales=None) for each in taken]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays, axis=1), *taken)
    return tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(len(blocks)))


def _put(state: DeviceState, blocks: Int[Array, " blocks"], contents: tuple[HostBlock, ...]) -> DeviceState:
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *contents)
    pages = [
        each.put_blocks(blocks, jax.tree.map(lambda x, i=i: x[:, i], stacked)) for i, each in enumerate(state.pages)
    ]
    return state.with_pages(pages)


def _runs(moves: Sequence[Sequence[int]]) -> Iterator[tuple[BlockMove, list[tuple[int, int]]]]:
    """Split moves, in order, into runs that can execute in parallel: of one kind, without a dependency.

    No move of a run writes a target, and no copy reads a source, that an earlier move of the run wrote.
    """
    run: list[tuple[int, int]] = []
    written: set[int] = set()
    last: BlockMove | None = None
    for number, source, target in moves:
        kind = BlockMove(number)
        reads_written = kind in (BlockMove.COPY, BlockMove.STATE) and source in written
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
