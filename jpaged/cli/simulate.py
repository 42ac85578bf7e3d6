"""`jpaged simulate`: simulates a load on one or more engines, without a device.

Imported late: modules that `run` needs, so that `--help` and errors in the command line print at once.
"""

import dataclasses
import math
import pathlib
import platform
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jpaged.cli.common.results import OutputJson, check_writable, write_json
from jpaged.cli.flags.engine import one_line_help
from jpaged.errors import RequestError
from jpaged.version import __version__

if TYPE_CHECKING:
    from jpaged.simulator.cost import CostModel
    from jpaged.simulator.load import Arrival
    from jpaged.simulator.simulation import SimulationOptions
    from jpaged.simulator.step_load import EngineShape

OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
OptionalFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
OptionalFile = Annotated[pathlib.Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
OptionalText = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]

# Sizes if the cost model has no engine and no flag gives them. The first three are the engine's defaults on GPU.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, BLOCK_SIZE, MAX_MODEL_LEN = 256, 2048, 16, 2048


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulate:
    """Simulate a load on one or more engines. The scheduler and the KV cache manager are real, the time is simulated.

    A cost model sets the duration of each step. Prints throughput, latencies, preemptions, prefix hits and KV use.

    Example: jpaged simulate --cost-model demo-cpu --num-requests 2000 --rate 2 --prompt-tokens lognormal:128:0.5

    Example: jpaged simulate --cost-model h200.json --trace day.csv --num-replicas 4 --routing prefix-affine

    Example: jpaged simulate --cost-model h200.json --trace day.csv --tensor-parallel-size 8 --link-bandwidth 450e9
    --link-latency 1.9e-6
    """

    cost_model: OptionalText = None
    """Durations of steps. A file of `jpaged bench steps --output-json`, or demo-cpu, measured with the demo model on 2
    CPU cores, or coefficients in seconds: fixed=0.004,per_token=2e-6,per_row=...,per_kv_token=...,
    per_prompt_pair=...,per_moved_block=... (default 0 each)."""

    trace: OptionalFile = None
    """File of requests: .csv with a header, or JSON lines. Columns: arrival (seconds), prompt_tokens, output_tokens;
    optional: prefix_id, prefix_tokens, priority. Default: generate a load from the flags below."""

    num_requests: int = 1000
    """Number of requests of a generated load."""

    rate: OptionalFloat = None
    """Average number of requests per second. inf: all requests arrive at once."""

    arrivals: str = "poisson"
    """Distribution of arrival times. poisson. gamma:SPREAD: SPREAD is the standard deviation of the gaps over their
    mean; 1 equals poisson, larger values are bursty. onoff:ON:OFF: poisson for ON seconds, then none for OFF seconds,
    with an average of --rate."""

    prompt_tokens: str = "256"
    """Prompt tokens per request, without its prefix: N, uniform:LOWEST:HIGHEST, or lognormal:MEAN:SPREAD, where SPREAD
    is the standard deviation over the mean."""

    output_tokens: str = "128"
    """Tokens that each request generates, in the same form. Lengths are capped at --max-model-len."""

    prefixes: int = 0
    """Number of different prefixes."""

    prefix_tokens: int = 0
    """Length of each prefix, in tokens."""

    prefix_zipf: float = 1.0
    """Zipf exponent: prefix k is chosen with probability proportional to 1 / k**exponent. 0: all equally likely."""

    prefix_share: float = 1.0
    """Fraction of the requests that begin with a prefix."""

    priorities: str = "0"
    """Priorities with weights: 0:9,-5:1 gives one request in ten priority -5. Lower priorities start first. Needs
    --scheduling-policy priority."""

    seed: int = 0
    """Seed of the generated load."""

    concurrency: OptionalInt = None
    """Maximum number of requests in the system. Further arrivals wait outside. With --rate inf: the number of clients
    that each send the next request after an answer. Default: no limit."""

    max_queued_requests: OptionalInt = None
    """Maximum number of waiting requests per replica. Further arrivals are refused. Default: no limit."""

    max_queued_tokens: OptionalInt = None
    """Maximum number of waiting prompt tokens per replica. Further arrivals are refused. Default: no limit."""

    scheduling_policy: Literal["fcfs", "priority", "shortest_first"] = "fcfs"
    """Order in which waiting requests start. fcfs: first come, first served. priority: lowest first, minus 1 per 60 s
    of waiting. shortest_first: fewest remaining output tokens first, minus 20 per second of waiting."""

    max_num_partial_prefills: int = 1
    """Maximum number of chunked prompts in progress at the same time."""

    target_step_ms: OptionalFloat = None
    """Target duration of a step in ms. While requests generate, prompts use smaller chunks to meet it. No default."""

    max_tokens: OptionalInt = None
    """max_tokens of each request, as the scheduler sees it. A request may end earlier, as at a stop token. Default: the
    number of tokens that the request generates."""

    num_replicas: Annotated[int, tyro.conf.arg(aliases=["--data-parallel-size"])] = 1
    """Number of engines. A router distributes the requests."""

    tensor_parallel_size: int = 1
    """Number of devices per engine. Predicted from a cost model of one device: its seconds are divided by this number,
    then two all-reduces per layer and one for the embedding are added. The KV pool of several devices is larger: set
    --num-blocks as `jpaged plan --tensor-parallel-size` prints it."""

    link_bandwidth: OptionalFloat = None
    """Bytes per second that a device sends to the others: 450e9 for NVLink 4 (H100, H200), 300e9 for NVLink 3 (A100),
    32e9 for PCIe 4, 100e9 for TPU v5e. Needs --tensor-parallel-size above 1."""

    link_latency: OptionalFloat = None
    """Seconds per step of an all-reduce: 1.9e-6 for NVLink, 2.5e-6 for PCIe, 1e-6 for TPU."""

    num_layers: OptionalInt = None
    """Number of layers, for --tensor-parallel-size. Default: the cost model's."""

    hidden_bytes: OptionalInt = None
    """Bytes of a token's hidden state, for --tensor-parallel-size: 2 * hidden_size in bfloat16. Default: the cost
    model's."""

    routing: Literal["round-robin", "least-loaded", "prefix-affine"] = "round-robin"
    """Choice of the replica. round-robin: in turn. least-loaded: the replica with the fewest requests. prefix-affine:
    the first replica that received the prefix and has at most 1.25 times the mean number of requests plus one, else the
    least loaded replica."""

    num_blocks: OptionalInt = None
    """Blocks of each engine's KV pool. Default: the cost model's."""

    block_size: OptionalInt = None
    """Tokens per block. Default: the cost model's, or 16."""

    max_num_seqs: OptionalInt = None
    """Maximum number of requests that run at once. Default: the cost model's, or 256."""

    max_num_batched_tokens: OptionalInt = None
    """Maximum number of tokens computed in one step. Default: the cost model's, or 2048."""

    max_model_len: OptionalInt = None
    """Maximum number of tokens of one request, prompt and output together. Default: the cost model's, or 2048."""

    enable_prefix_caching: bool = True
    """Reuse the KV of earlier requests with the same prefix."""

    host_blocks: OptionalInt = None
    """Blocks of host memory per engine, for preempted requests and later prefix hits. Default: none."""

    swap_space: OptionalFloat = None
    """--host-blocks in GiB. The cost model must contain the size of a block."""

    seconds_per_move: OptionalFloat = None
    """Seconds to move a block to host memory or back, on all devices in parallel. Default: the cost model's
    per_moved_block."""

    output_json: OutputJson = None
    """Write all results, with distributions and time series, to this file, as JSON."""

    plot: OptionalFile = None
    """Plot time series and distributions into this file (.png, .svg, .pdf). Needs matplotlib."""

    def run(self) -> int:
        from jpaged.simulator.cost import read_cost_model
        from jpaged.simulator.plot import check_plot, draw
        from jpaged.simulator.simulation import simulate

        if self.cost_model is None:
            forms = "a file of `jpaged bench steps --output-json`, demo-cpu, or fixed=SECONDS,per_token=SECONDS"
            raise RequestError("cost_model", None, f"set the durations of steps: {forms}")
        cost = self._with_move(self._over_devices(read_cost_model(self.cost_model)))
        shape = self._shape(cost)
        options = self._options(cost, shape)
        check_writable(self.output_json)
        if self.plot is not None:
            check_plot(self.plot)
        load, total = self._load(shape)
        from tqdm import tqdm

        with tqdm(total=total, unit="req", disable=not sys.stderr.isatty(), leave=False, mininterval=0.5) as bar:
            result = simulate(load, options, progress=bar.update)
        self._print_engine(load, shape)
        if options.host_blocks and not result.host_blocks:
            print("Host tier:               none: moving a block both ways takes longer than computing its tokens")
        print(result.table())
        if self.plot is not None:
            title = f"{result.finished_requests:,} requests, {self.num_replicas} x {shape.max_num_seqs} rows"
            draw(result, self.plot, f"{title}; {cost.origin}")
        about = {"jpaged": __version__, "python": platform.python_version()}
        write_json(self.output_json, {**result.as_json(), "versions": about})
        return 0

    def _options(self, cost: "CostModel", shape: "EngineShape") -> "SimulationOptions":
        from jpaged.simulator.simulation import SchedulingOptions, SimulationOptions

        return SimulationOptions(
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

    def _print_engine(self, load: "Iterable[Arrival]", shape: "EngineShape") -> None:
        from jpaged.simulator.trace import Trace

        devices = f"{self.tensor_parallel_size} devices, " if self.tensor_parallel_size > 1 else ""
        print(
            f"Engine:                  {self.num_replicas} x {devices}{shape.max_num_seqs} rows, "
            f"{shape.max_num_batched_tokens:,} tokens a step, {shape.num_blocks:,} blocks of {shape.block_size}, "
            f"{self.routing}"
        )
        ignored = isinstance(load, Trace) and load.has_priorities and self.scheduling_policy != "priority"
        note = "; the trace's priorities have an effect with --scheduling-policy priority only" if ignored else ""
        print(f"Policy:                  {self.scheduling_policy}{note}")

    def _over_devices(self, cost: "CostModel") -> "CostModel":
        """Return the cost model for `tensor_parallel_size` devices. Its `engine.block_bytes` are per device."""
        from jpaged.collectives import Link
        from jpaged.simulator.cost import AllReduces

        devices, engine = self.tensor_parallel_size, cost.engine
        if devices < 1:
            raise RequestError("tensor_parallel_size", devices, "must be a number of devices, from 1")
        if devices == 1:
            for name in ("link_bandwidth", "link_latency", "num_layers", "hidden_bytes"):
                if getattr(self, name) is not None:
                    reason = "has an effect only with --tensor-parallel-size above 1: leave it out"
                    raise RequestError(name, getattr(self, name), reason)
            return cost
        if engine is not None and engine.num_devices > 1:
            measured = f"the cost model was measured on {engine.num_devices} devices and holds for them: leave it out"
            raise RequestError("tensor_parallel_size", devices, measured)
        if self.link_bandwidth is None:
            raise RequestError("link_bandwidth", None, "set the bytes per second of a device: 450e9 for NVLink 4")
        if self.link_latency is None:
            raise RequestError("link_latency", None, "set the seconds per step of an all-reduce: 1.9e-6 for NVLink 4")
        sizes = {}
        for name in ("num_layers", "hidden_bytes"):
            given = getattr(self, name)
            sizes[name] = given if given is not None or engine is None else getattr(engine, name)
            if sizes[name] is None:
                raise RequestError(name, None, "the cost model does not contain it: set it")
            if sizes[name] < 1:
                raise RequestError(name, sizes[name], "must be at least 1")
        split = cost.split(
            AllReduces(
                num_devices=devices, count=2 * sizes["num_layers"] + 1, hidden_bytes=sizes["hidden_bytes"],
                link=Link(self.link_bandwidth, self.link_latency),
            )
        )  # fmt: skip
        if engine is None:
            return split
        block_bytes = None if engine.block_bytes is None else -(-engine.block_bytes // devices)
        shape = dataclasses.replace(engine, num_devices=devices, block_bytes=block_bytes, **sizes)
        return dataclasses.replace(split, engine=shape)

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
            raise RequestError("host_blocks", self.host_blocks, "and --swap-space exclude each other: give one of them")
        if not 0 <= self.swap_space < math.inf:
            raise RequestError("swap_space", self.swap_space, "must be GiB of host memory, from 0")
        if shape.block_bytes is None:
            raise RequestError(
                "swap_space", self.swap_space, "the cost model does not contain the size of a block: give --host-blocks"
            )
        return int(self.swap_space * 2**30) // shape.block_bytes

    def _shape(self, cost: "CostModel") -> "EngineShape":
        """Return the engine's sizes: the flags', else the cost model's, else the defaults. Raises RequestError."""
        from jpaged.simulator.step_load import EngineShape

        measured = cost.engine
        if measured is None:
            if self.num_blocks is None:
                raise RequestError("num_blocks", None, "the cost model has no engine: give the number of KV blocks")
            measured = EngineShape(
                self.num_blocks, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, self.max_model_len or MAX_MODEL_LEN,
                num_devices=self.tensor_parallel_size,
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
        """Return the requests and their number. Raises RequestError."""
        from jpaged.simulator.load import ArrivalTimes, GeneratedLoad, LengthDistribution, parse_priorities
        from jpaged.simulator.trace import Trace

        if self.trace is not None:
            for field in GENERATED:
                if getattr(self, field) != _default(field):
                    raise RequestError(field, getattr(self, field), "is for generated loads: leave it out with --trace")
            trace = Trace(self.trace, shape.max_model_len)
            return trace, trace.num_requests
        if self.rate is None:
            raise RequestError("rate", None, "give the number of requests per second (or inf), or a --trace")
        priorities = parse_priorities(self.priorities)
        if len(priorities) > 1 and self.scheduling_policy != "priority":
            raise RequestError("priorities", self.priorities, "have an effect with --scheduling-policy priority only")
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
