"""`jpaged bench`: measures the engine on this machine, with the workloads and figures of vLLM's benchmarks.

`quality` measures the model.
"""

import dataclasses
from typing import Annotated

import tyro

from jpaged.cli.bench_latency import Latency
from jpaged.cli.bench_quality import QualityCommand
from jpaged.cli.bench_startup import Startup
from jpaged.cli.bench_steps import Steps
from jpaged.cli.bench_throughput import Throughput


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure the throughput of many requests, the latency of one batch, the time of steps or a start, or quality."""

    command: Annotated[
        Annotated[Throughput, tyro.conf.subcommand("throughput")]
        | Annotated[Latency, tyro.conf.subcommand("latency")]
        | Annotated[Steps, tyro.conf.subcommand("steps")]
        | Annotated[QualityCommand, tyro.conf.subcommand("quality")]
        | Annotated[Startup, tyro.conf.subcommand("startup")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        """Run the chosen measurement."""
        return self.command.run()
