"""`jpaged simulate`: what a load does to engines of a given size, without a device."""

import dataclasses
import math
import pathlib
import platform
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jpaged.cli.results import OutputJson, check_writable, write_json
from jpaged.errors import RequestError
from jpaged.version import __version__

if TYPE_CHECKING:
    from jpaged.simulator.cost import CostModel
    from jpaged.simulator.load import Arrival
    from jpaged.simulator.step_load import EngineShape

OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
OptionalFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
OptionalFile = Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
OptionalText = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]

# An engine's sizes where neither a flag nor the cost model says them: what `LLM` takes on an accelerator.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, BLOCK_SIZE, MAX_MODEL_LEN = 256, 2048, 16, 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulate:
    """Simulate a load: the real scheduler and KV manager, one or several, under a clock that a cost model drives.

    Prints throughput, latencies, preemptions, cache hits and the use of the KV cache.

    Example: jpaged simulate --cost-model demo-cpu --num-requests 2000 --rate 2 --prompt-tokens lognormal:128:0.5

    Example: jpaged simulate --cost-model h200.json --trace day.csv --num-replicas 4 --routing prefix-affine
    """

    cost_model: OptionalText = None
    """How long a step takes: a file that `jpaged bench steps --output-json` wrote; demo-cpu, the demo model on a CPU
    with two cores, which is shipped; or coefficients by hand, in seconds: fixed=0.004,per_token=2e-6,per_row=...,
    per_kv_token=...,per_prompt_pair=...,per_moved_block=... (those left out are 0)."""

    trace: OptionalFile = None
    """The load: a file of requests, .csv with a header or JSON lines. Columns arrival (seconds), prompt_tokens,
    output_tokens, and if you like prefix_id, prefix_tokens, priority. Without it a load is generated:"""

    num_requests: int = 1000
    """Requests of a generated load."""

    rate: OptionalFloat = None
    """Requests a second, on average; inf: all at once."""

    arrivals: str = "poisson"
    """poisson; gamma:SPREAD (standard deviation of the gaps over their mean: 1 is poisson, above is bursty); or
    onoff:ON:OFF (poisson for ON seconds, nothing for OFF seconds; --rate is the average over both)."""

    prompt_tokens: str = "256"
    """Prompt tokens of each request, beside its prefix: N, uniform:LOWEST:HIGHEST, or lognormal:MEAN:SPREAD (standard
    deviation over mean)."""

    output_tokens: str = "128"
    """Tokens that each request generates, likewise. Lengths are cut to --max-model-len."""

    prefixes: int = 0
    """How many different prefixes requests begin with."""

    prefix_tokens: int = 0
    """Tokens of each prefix."""

    prefix_zipf: float = 1.0
    """How uneven their popularity is: the k-th is chosen in proportion to 1 / k to this power; 0: all alike."""

    prefix_share: float = 1.0
    """Share of the requests that begin with a prefix."""

    priorities: str = "0"
    """Priorities of the requests with their shares, lower first: 0:9,-5:1. Needs --scheduling-policy priority."""

    seed: int = 0
    """Of the generated load."""

    concurrency: OptionalInt = None
    """An arrival is held back while so many requests are in the system: with --rate inf, so many clients that each
    send the next request when they have an answer."""

    max_queued_requests: OptionalInt = None
    """An arrival is refused while so many requests wait at its replica. Default: none is."""

    max_queued_tokens: OptionalInt = None
    """An arrival is refused when it would bring the prompt tokens that wait at its replica beyond this."""

    scheduling_policy: Literal["fcfs", "priority", "shortest_first"] = "fcfs"
    """Who starts first: who came first; the lowest priority (60 s of waiting count as one); or who may generate the
    fewest tokens (a second of waiting counts as 20)."""

    max_num_partial_prefills: int = 1
    """Prompts too long for one step that are under way at once."""

    target_step_ms: OptionalFloat = None
    """Milliseconds that a step should take at most: prompts advance in smaller chunks."""

    max_tokens: OptionalInt = None
    """What each request allows itself, as far as the scheduler knows; it ends earlier, at a stop token. Default: what
    it generates."""

    num_replicas: int = 1
    """Engines behind the router."""

    routing: Literal["round-robin", "least-loaded", "prefix-affine"] = "round-robin"
    """round-robin: in turns. least-loaded: fewest requests that wait or run. prefix-affine: a prefix has its replica,
    unless that has over 1.25 times the mean number of requests plus one; then the prefix's next one."""

    num_blocks: OptionalInt = None
    """Blocks of each engine's KV pool. Default: the measured engine's."""

    block_size: OptionalInt = None
    """Tokens in a block. Default: the measured engine's, or 16."""

    max_num_seqs: OptionalInt = None
    """Most requests that run at once. Default: the measured engine's, or 256."""

    max_num_batched_tokens: OptionalInt = None
    """Most tokens computed in one step. Default: the measured engine's, or 2048."""

    max_model_len: OptionalInt = None
    """Most tokens of one request, prompt and output together. Default: the measured engine's, or 2048."""

    enable_prefix_caching: bool = True
    """Reuse the KV of requests that begin alike."""

    host_blocks: OptionalInt = None
    """Blocks that host memory has room for beside each engine: a second tier of the prefix cache, and of preempted
    requests. Default: none."""

    swap_space: OptionalFloat = None
    """The same in GiB, where the cost model knows the bytes of a block."""

    seconds_per_move: OptionalFloat = None
    """Seconds that moving a block to the host takes, or back. Default: the cost model's per_moved_block."""

    output_json: OutputJson = None
    """Write all figures, the distributions and the course over time to this file."""

    plot: OptionalFile = None
    """Draw the course over time and the distributions to this file (.png, .svg, .pdf). Needs matplotlib."""

    def run(self) -> int:
        """Simulate and print."""
        from jpaged.simulator.cost import read_cost_model
        from jpaged.simulator.plot import check_plot, draw
        from jpaged.simulator.simulation import SchedulingOptions, SimulationOptions, simulate
        from jpaged.simulator.trace import Trace

        if self.cost_model is None:
            forms = "a file of `jpaged bench steps --output-json`, demo-cpu, or fixed=SECONDS,per_token=SECONDS"
            raise RequestError("cost_model", None, f"say how long steps take: {forms}")
        cost = self._with_move(read_cost_model(self.cost_model))
        shape = self._shape(cost)
        options = SimulationOptions(
            shape=shape,
            cost=cost,
            num_replicas=self.num_replicas,
            routing=self.routing,
            prefix_caching=self.enable_prefix_caching,
            max_tokens=self.max_tokens,
            concurrency=self.concurrency,
            scheduling=SchedulingOptions(
                scheduling_policy=self.scheduling_policy,
                max_num_partial_prefills=self.max_num_partial_prefills,
                target_step_ms=self.target_step_ms,
                max_queued_requests=self.max_queued_requests,
                max_queued_tokens=self.max_queued_tokens,
            ),
            host_blocks=self._host_blocks(shape),
        )
        check_writable(self.output_json)
        if self.plot is not None:
            check_plot(self.plot)
        load, total = self._load(shape)
        from tqdm import tqdm

        with tqdm(total=total, unit="req", disable=not sys.stderr.isatty(), leave=False, mininterval=0.5) as bar:
            result = simulate(load, options, progress=bar.update)
        print(
            f"Engine:                  {self.num_replicas} x {shape.max_num_seqs} rows, "
            f"{shape.max_num_batched_tokens:,} tokens a step, {shape.num_blocks:,} blocks of {shape.block_size}, "
            f"{self.routing}"
        )
        heeded = self.scheduling_policy == "priority"
        ignored = isinstance(load, Trace) and load.has_priorities and not heeded
        note = "; the trace's priorities count with --scheduling-policy priority only" if ignored else ""
        print(f"Policy:                  {self.scheduling_policy}{note}")
        if options.host_blocks and not result.host_blocks:
            print("Host tier:               none: moving a block both ways takes longer than computing its tokens")
        print(result.table())
        if self.plot is not None:
            title = f"{result.finished_requests:,} requests, {self.num_replicas} x {shape.max_num_seqs} rows"
            draw(result, self.plot, f"{title}; {cost.origin}")
        about = {"jpaged": __version__, "python": platform.python_version()}
        write_json(self.output_json, {**result.as_json(), "versions": about})
        return 0

    def _with_move(self, cost: "CostModel") -> "CostModel":
        given = self.seconds_per_move
        if given is None:
            return cost
        if not 0 < given < math.inf:
            raise RequestError("seconds_per_move", given, "must be above 0")
        origin = f"{cost.origin}; {given:g} s a moved block given by hand"
        return dataclasses.replace(cost, per_moved_block=given, origin=origin)

    def _host_blocks(self, shape: "EngineShape") -> int:
        if self.swap_space is None:
            return self.host_blocks or 0
        if self.host_blocks is not None:
            raise RequestError("host_blocks", self.host_blocks, "is what --swap-space says in GiB: give one of them")
        if not 0 <= self.swap_space < math.inf:
            raise RequestError("swap_space", self.swap_space, "must be GiB of host memory, from 0")
        if shape.block_bytes is None:
            raise RequestError(
                "swap_space", self.swap_space, "the cost model does not know the bytes of a block: give --host-blocks"
            )
        return int(self.swap_space * 2**30) // shape.block_bytes

    def _shape(self, cost: "CostModel") -> "EngineShape":
        """The engine: what the flags say, then what was measured, then defaults."""
        from jpaged.simulator.step_load import EngineShape

        measured = cost.engine
        if measured is None:
            if self.num_blocks is None:
                raise RequestError("num_blocks", None, "the cost model names no engine: say how many blocks the KV has")
            measured = EngineShape(
                self.num_blocks, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, self.max_model_len or MAX_MODEL_LEN
            )
        given = {name: getattr(self, name) for name in ("num_blocks", "block_size", "max_model_len")}
        shape = dataclasses.replace(measured, **{name: value for name, value in given.items() if value is not None})
        if measured.block_bytes is not None:
            block_bytes = measured.block_bytes * shape.block_size // measured.block_size
            shape = dataclasses.replace(shape, block_bytes=block_bytes)
        rows, tokens = self.max_num_seqs, self.max_num_batched_tokens
        return shape.resized(
            max_num_seqs=shape.max_num_seqs if rows is None else rows,
            max_num_batched_tokens=shape.max_num_batched_tokens if tokens is None else tokens,
        )

    def _load(self, shape: "EngineShape") -> "tuple[Iterable[Arrival], int]":
        """The requests, and how many they are."""
        from jpaged.simulator.load import ArrivalTimes, GeneratedLoad, LengthDistribution, parse_priorities
        from jpaged.simulator.trace import Trace

        if self.trace is not None:
            for field in GENERATED:
                if getattr(self, field) != _default(field):
                    raise RequestError(field, getattr(self, field), "is for generated loads: leave it out with --trace")
            trace = Trace(self.trace, shape.max_model_len)
            return trace, trace.num_requests
        if self.rate is None:
            raise RequestError("rate", None, "say how many requests arrive a second (or inf), or give a --trace")
        priorities = parse_priorities(self.priorities)
        if len(priorities) > 1 and self.scheduling_policy != "priority":
            raise RequestError("priorities", self.priorities, "count with --scheduling-policy priority only")
        generated = GeneratedLoad(
            num_requests=self.num_requests,
            times=ArrivalTimes(self.arrivals, self.rate),
            prompt_tokens=LengthDistribution("prompt_tokens", self.prompt_tokens),
            output_tokens=LengthDistribution("output_tokens", self.output_tokens),
            max_model_len=shape.max_model_len,
            seed=self.seed,
            prefixes=self.prefixes,
            prefix_tokens=self.prefix_tokens,
            prefix_zipf=self.prefix_zipf,
            prefix_share=self.prefix_share,
            priorities=priorities,
        )
        return generated, self.num_requests


GENERATED = ("num_requests", "rate", "arrivals", "prompt_tokens", "output_tokens", "seed", "prefixes", "prefix_tokens",
             "prefix_zipf", "prefix_share", "priorities")  # fmt: skip


def _default(field: str) -> Any:
    return next(each.default for each in dataclasses.fields(Simulate) if each.name == field)
