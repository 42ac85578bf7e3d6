"""`jpaged bench`: vLLM's workloads and metrics. `serve` measures a server, `quality` a model, all others an engine."""

import dataclasses
from typing import Annotated

import tyro

from jpaged.cli.bench.latency import Latency
from jpaged.cli.bench.quality import QualityCommand
from jpaged.cli.bench.serve import BenchServe
from jpaged.cli.bench.speculation import Speculation
from jpaged.cli.bench.startup import Startup
from jpaged.cli.bench.steps import Steps
from jpaged.cli.bench.throughput import Throughput


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure a server, the throughput of many requests, the latency of a batch, steps, a start, quality, or drafts."""

    command: Annotated[
        Annotated[BenchServe, tyro.conf.subcommand("serve")]
        | Annotated[Throughput, tyro.conf.subcommand("throughput")]
        | Annotated[Latency, tyro.conf.subcommand("latency")]
        | Annotated[Steps, tyro.conf.subcommand("steps")]
        | Annotated[QualityCommand, tyro.conf.subcommand("quality")]
        | Annotated[Startup, tyro.conf.subcommand("startup")]
        | Annotated[Speculation, tyro.conf.subcommand("speculation")],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        return self.command.run()
