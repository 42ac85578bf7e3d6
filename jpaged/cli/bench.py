"""`jpaged bench`: what the engine gives on this machine, with vLLM's workload defaults and names of figures."""

import dataclasses
from typing import Annotated

import tyro

from jpaged.cli.bench_latency import Latency
from jpaged.cli.bench_steps import Steps
from jpaged.cli.bench_throughput import Throughput


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure throughput, latency, or single steps."""

    command: Annotated[
        Annotated[Throughput, tyro.conf.subcommand("throughput")]
        | Annotated[Latency, tyro.conf.subcommand("latency")]
        | Annotated[Steps, tyro.conf.subcommand("steps")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        """Run the measurement that was chosen."""
        return self.command.run()
