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

from jpaged.engine.step_plan import EVERYTHING, BlockMove, TransferCosts
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
HOST_BUCKET = 16  # blocks per program that moves them to the host or back. A snapshot has a run of its own
PINNED = "pinned_host"

# A pytree like KVPages of one block, stacked over the page arrays. On the host its leaves are jax.Arrays in pinned
# memory. Without pinned memory they are numpy arrays, or jax.Arrays if there is a mesh.
HostBlock = Any
# Arrays of a state, each stacked over the recurrent layers, in the same memory as those of a HostBlock
HostState = tuple[Any, ...]


def host_slots(swap_space: float, block_bytes: int, state_bytes: int = 0) -> int:
    """Number of blocks in `swap_space` GiB of host memory.

    state_bytes: of a snapshot of recurrent state, which has to fit, too; 0: there are none. Raises ModelLoadError if
    `swap_space` exceeds RAM, or fits no block or no snapshot.
    """
    if not 0 <= swap_space < float("inf"):
        raise ModelLoadError(f"swap_space={swap_space}: must be GiB of host memory, at least 0")
    if not swap_space:
        return 0
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if swap_space * 2**30 > total:
        raise ModelLoadError(
            f"swap_space={swap_space}: this machine has {total / 2**30:.1f} GiB of memory in all; lower it"
        )
    for name, size in {"a block": block_bytes, "a snapshot of recurrent state": state_bytes}.items():
        if size > swap_space * 2**30:
            raise ModelLoadError(f"swap_space={swap_space}: {name} has {size / 2**30:.4f} GiB; raise it, or set 0")
    return int(swap_space * 2**30) // block_bytes


class BlockMover:
    """Runs moves of blocks and states, and stores the blocks and snapshots of the host tier."""

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
        self._host_states: dict[int, HostState] = {}

        def moving(function: Callable[..., DeviceState], *arguments: Any) -> jax.stages.Compiled:
            call = placement.on_each_device(functools.partial(function), (state, *arguments), state)
            return compile_program(
                call, (state, *arguments), donate=(0,), out_shardings=formats(state), store=store
            )

        self._copies = {size: moving(_copy, placement.shape((size, 2), np.int32)) for size in COPY_BUCKETS}
        if state.recurrent:
            self._copy_states = moving(_copy_states, placement.shape((STATE_BUCKET, 2), np.int32))
        self.moves_states = bool(host_slots and state.recurrent and has_snapshots(state))
        if self.moves_states:
            slot = placement.shape((1,), np.int32)
            stacked = tuple(_stacked(leaf, len(state.recurrent)) for leaf in state.recurrent[0])
            self._state_shardings = tuple(leaf.sharding for leaf in stacked)
            call = placement.on_each_device(functools.partial(_take_state), (state.recurrent, slot), stacked)
            self._take_state = compile_program(call, (state.recurrent, slot), donate=(), store=store)
            self._put_state = moving(_put_state, slot, stacked)
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
                case BlockMove.STATE_TO_HOST:
                    for slot, host_slot in run:
                        taken = self._take_state(state.recurrent, self._placement.put(np.array([slot], np.int32)))
                        self._host_states[host_slot] = tuple(map(self._to_host_memory, taken))
                case BlockMove.STATE_TO_DEVICE:
                    for host_slot, slot in run:
                        arrays = jax.device_put(self._host_states[host_slot], self._state_shardings)
                        state = self._put_state(state, self._placement.put(np.array([slot], np.int32)), arrays)
                case BlockMove.DROP | BlockMove.DROP_STATE:
                    _drop(self._host if kind is BlockMove.DROP else self._host_states, [slot for slot, _ in run])
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
        """Measure the time to move a block, to move a state, and to compute a token. step: computes `num_tokens`."""

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
        per_state = 0.0
        if self.moves_states:
            moves = [(BlockMove.STATE_TO_HOST, 0, 0), (BlockMove.STATE_TO_DEVICE, 0, 0)]
            state, both = seconds(lambda s: self.run(s, np.array(moves)))
            per_state = both / 2
        self.close()
        costs = TransferCosts(moving / (2 * HOST_BUCKET), computing / num_tokens, seconds_per_state=per_state)
        logger.info(
            "host tier: moving a block (%.1f KiB) takes %.0f us, computing a token %.0f us",
            block_bytes / 1024, costs.seconds_per_move * 1e6, costs.seconds_per_token * 1e6,
        )  # fmt: skip
        if self.moves_states:
            logger.info("host tier: moving a snapshot of recurrent state takes %.0f us", per_state * 1e6)
        if not costs.keeping_pays(state.pages[0].block_size):
            logger.warning("swap_space is not used: computing a block's tokens takes less time here than moving it")
        return state, costs

    def _placed(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._block_sharding)

    def close(self) -> None:
        """Free the blocks and the snapshots of the host tier."""
        self._host.clear()
        self._host_states.clear()

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
        if self._host_sharding is not None:  # if a block has pinned memory, so has a state
            return jax.device_put(array, array.sharding.with_memory_kind(PINNED))
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


def has_snapshots(state: DeviceState) -> bool:
    """Whether the state of recurrent layers has slots for snapshots."""
    return state.recurrent[0][0].shape[0] > state.table.shape[0]


def _stacked(slots: Any, num_layers: int) -> jax.ShapeDtypeStruct:
    """Shape of one slot of an array of recurrent state, stacked over layers. The layers take the axis of the slots."""
    return jax.ShapeDtypeStruct((num_layers, *slots.shape[1:]), slots.dtype, sharding=slots.sharding)


def _take_state(recurrent: tuple[tuple[Array, ...], ...], slot: Int[Array, " one"]) -> tuple[Array, ...]:
    """A slot of all recurrent layers: each array of a state, stacked over layers."""
    return tuple(
        jnp.stack([jax.lax.dynamic_index_in_dim(slots, slot[0], keepdims=False) for slots in arrays])
        for arrays in zip(*recurrent, strict=True)
    )


def _put_state(state: DeviceState, slot: Int[Array, " one"], contents: tuple[Array, ...]) -> DeviceState:
    """Write arrays from `_take_state` into a slot of all recurrent layers."""

    def put(slots: Array, content: Array) -> Array:
        plain = lambda own: jax.lax.dynamic_update_index_in_dim(own, content, slot[0], 0)  # noqa: E731
        return set_rows(slots, slot, content.reshape(1, -1), plain=plain)

    recurrent = tuple(
        tuple(put(slots, content[i]) for slots, content in zip(layer, contents, strict=True))
        for i, layer in enumerate(state.recurrent)
    )
    return state.replace(recurrent=recurrent)


def _drop(stored: dict[int, Any], slots: Sequence[int]) -> None:
    """Free the memory of host slots. `EVERYTHING` stands for all of them."""
    if EVERYTHING in slots:
        stored.clear()
    for slot in slots:
        stored.pop(slot, None)


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
