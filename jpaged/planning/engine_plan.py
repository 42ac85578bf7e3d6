"""An engine's plan: its use of device memory, as data.

Imported late: `size_text`, because `jpaged.planning` is imported without JAX.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged.runtime.memory.plan import MemoryPlan
    from jpaged.runtime.prediction.roofline import Roofline


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table of bytes."""

    name: str
    num_bytes: int
    note: str = ""
    parts: tuple["Row", ...] = ()


@dataclasses.dataclass(frozen=True)
class Temporaries:
    """Device memory that the largest program allocates while it runs."""

    num_bytes: int
    measured: bool  # True: read from the compiled program. False: estimated from the shapes
    program: str    # the program with the most temporaries
    how: str        # kind of device that it was compiled for, or the reason for the estimate


@dataclasses.dataclass(frozen=True)
class AdapterMemory:
    """Memory of LoRA adapters."""

    num_bytes: int    # of the pools on one device
    slots: int        # adapters on the device
    rank: int         # largest rank of an adapter
    dtype: str
    host_slots: int   # adapters in host memory, at most
    slot_bytes: int   # host memory of one adapter

    @property
    def host_bytes(self) -> int:
        """Host memory of all adapters, at most."""
        return self.host_slots * self.slot_bytes


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """Memory use of an engine on one device, and the number of requests that fit."""

    model: str
    dtype: str
    kv_dtype: str  # of the KV pages
    device: str
    device_bytes: int | None  # None: CPU, or a back end that does not report it
    taken_bytes: int          # in use by other programs
    usable_bytes: int | None  # limit of bytes in use that the options set, including taken_bytes
    weight_kinds: dict[str, dict[str, int]]  # part -> kind of stored numbers -> bytes: `weight_bytes.weight_kinds`
    temporaries: Temporaries
    memory: "MemoryPlan | None"            # None: the engine does not fit
    problem: str | None                    # the engine's error message if it does not fit
    largest_max_model_len: int | None      # largest that fits, whatever the option says; None: not one block fits
    requests: tuple[tuple[int, int], ...]  # (tokens of a request, number of such requests that run at once)
    memory_is_capped: bool                 # kv_cache_memory_bytes is set
    host_blocks: int                       # blocks that fit into swap_space
    roofline: "Roofline | None" = None     # predicted times of the programs, if asked for
    format: str | None = None              # quant_method of the checkpoint; None: it is not quantised
    num_devices: int = 1                   # devices of one pipeline stage; all bytes are for one device
    num_parts: int = 1                     # shards of the weights and of the pages
    whole_bytes: int = 0                   # bytes of weights that are replicated on every device
    stage: tuple[int, int] = (0, 1)        # (index, number of stages): the fullest stage, which this plan describes
    num_layers: int = 0                    # layers of this stage
    drafter: str | None = None             # name of the drafter on the device; None: there is none
    adapters: AdapterMemory | None = None  # None without enable_lora
    drafter_bytes: int = 0                 # of its weights; with `memory`, also of its pages and its state

    @property
    def host_snapshots(self) -> int:
        """Snapshots of recurrent state that fit into swap_space, with the KV between two of them. 0: there are none."""
        plan = self.memory
        if plan is None or not plan.limits.num_snapshots:
            return 0
        each = plan.slot_bytes + plan.snapshot_interval * plan.block_bytes
        return self.host_blocks * plan.block_bytes // each

    @property
    def weight_parts(self) -> dict[str, int]:
        """Bytes of the weights by part."""
        return {part: sum(kinds.values()) for part, kinds in self.weight_kinds.items()}

    @property
    def least_devices(self) -> int:
        """Smallest tensor_parallel_size with which devices of this kind can hold the weights alone. 1 on CPU."""
        if self.usable_bytes is None:
            return 1
        room = max(1, self.usable_bytes - self.taken_bytes - self.whole_bytes)
        return max(1, -(-(self.weight_bytes - self.whole_bytes) * self.num_parts // room))

    @property
    def is_dequantised(self) -> bool:
        """True if the checkpoint is quantised, but this device stores all weights dequantised."""
        return self.format is not None and not any("scales" in kinds for kinds in self.weight_kinds.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.weight_parts.values())

    @property
    def rows(self) -> list[Row]:
        """The table of bytes. On an accelerator the rows add up to its memory, if the engine fits."""
        parts = tuple(Row(part, sum(kinds.values()), self._note(kinds)) for part, kinds in self.weight_kinds.items())
        note = self.dtype
        if self.num_parts > 1:
            share = f"{self.whole_bytes / 2**20:,.1f} MiB on every device, the rest split over {self.num_parts}"
            note = f"{self.dtype}; {share}"
        rows = [Row("weights", self.weight_bytes, note, parts)]
        how = "measured" if self.temporaries.measured else "ESTIMATED"
        of = f"of the largest program ({self.temporaries.program}), {how}"
        if self.drafter is not None:
            rows.append(Row("drafter", self.drafter_bytes, self.drafter, self._drafter_parts()))
        if self.adapters is not None:
            slots = f"{self.adapters.slots} slots of rank {self.adapters.rank}, {self.adapters.dtype}"
            rows.append(Row("LoRA adapters", self.adapters.num_bytes, slots))
        rows.append(Row("temporaries", self.temporaries.num_bytes, of))
        plan = self.memory
        if plan is not None:
            limits = plan.limits
            tables = len(limits.kv_groups.windows)
            each = f"{limits.max_num_seqs} rows, {tables} block table{'s'[: tables - 1]} of {limits.width:,} each"
            rows.append(Row("request table", plan.table_bytes - plan.state_bytes, each))
            if plan.state_bytes:
                rows.append(Row("recurrent state", plan.state_bytes, plan.state_note))
            blocks = f"{plan.num_blocks:,} blocks of {limits.block_size} tokens, {plan.block_bytes:,} bytes each"
            blocks += "" if self.kv_dtype == self.dtype else f", {self.kv_dtype}"
            rows.append(Row("KV pool", plan.kv_bytes, blocks))
        if self.device_bytes is None or self.usable_bytes is None:
            return rows
        if self.taken_bytes:
            rows.append(Row("taken by others", self.taken_bytes, "before the engine"))
        if plan is not None:
            left = self.usable_bytes - sum(row.num_bytes for row in rows)
            capped = self.memory_is_capped
            why = "kv_cache_memory_bytes caps the pool" if capped else "the number of blocks is rounded down"
            if not capped and self.kv_dtype != self.dtype and left > plan.kv_bytes // 8:
                why = "the kernels address at most 2 GiB of 8-bit keys and values a layer"
            rows.append(Row("left over", left, why))
        kept = self.device_bytes - self.usable_bytes
        rows.append(Row("kept free", kept, "what gpu_memory_utilization leaves"))
        return rows

    def _drafter_parts(self) -> tuple[Row, ...]:
        """Lines of a drafter's weights, pages and state."""
        if self.memory is None:
            return ()
        of_drafter, blocks = self.memory.drafter, self.memory.num_blocks
        pages = f"{blocks:,} blocks, {of_drafter.block:,} bytes each"
        return (
            Row("draft weights", of_drafter.weights), Row("draft pages", blocks * of_drafter.block, pages),
            Row("draft state", of_drafter.fixed),
        )  # fmt: skip

    def _note(self, kinds: Mapping[str, int]) -> str:
        """List a part's kinds of numbers with their sizes. Empty if all have the model's dtype."""
        from jpaged.runtime.memory.plan import size_text

        if kinds.keys() == {self.dtype}:
            return ""
        return ", ".join(f"{kind} {size_text(size)}" for kind, size in kinds.items())
