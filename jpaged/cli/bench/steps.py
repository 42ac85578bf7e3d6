"""`jpaged bench steps`: measures engine steps and fits a cost model for `jpaged simulate`.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import datetime
import sys
from typing import Any

from jpaged.cli.common.results import OutputJson, check_writable, machine, write_json
from jpaged.cli.flags.engine import ENGINE_DEFAULTS, EngineArguments, ModelArgument, engine_options, one_line_help
from jpaged.errors import RequestError


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """Measure the time of engine steps under many loads, and fit a cost model for `jpaged simulate --cost-model`.

    Loads: decodes with different numbers and lengths of requests, prompts of different lengths, and both in one batch.
    Prints the measured and the fitted time of each load. --swap-space adds the time of moving a block to the host.

    Example: jpaged bench steps demo --output-json steps.json
    """

    model_argument: ModelArgument = None
    """Folder, Hugging Face hub id, .gguf file, or demo."""

    repeats: int = 5
    """Runs of each load. The median is used."""

    output_json: OutputJson = None
    """Write the cost model to this file, as JSON."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        options = {**engine_options(self.engine, self.model_argument), "enable_prefix_caching": False}
        if self.repeats < 1:
            raise RequestError("repeats", self.repeats, "must be at least 1")
        for name, unit in (("data_parallel_size", "engine"), ("pipeline_parallel_size", "pipeline stage")):
            if options[name] > 1:
                raise RequestError(name, options[name], f"a cost model describes one {unit}: leave it out")
        check_writable(self.output_json)
        from tqdm import tqdm

        from jpaged.frontend.build import build_engine
        from jpaged.simulator.cost import COEFFICIENTS, fit, relative_errors, to_json
        from jpaged.simulator.measure import designed_cases, measure_steps

        model = options.pop("model")
        built = build_engine(model, None, options, progress=True)
        try:
            shape = engine_shape(built.engine.runner)
            moves = built.engine.runner.transfer_costs
            total = self.repeats * len(designed_cases(shape))
            with tqdm(total=total, unit="load", disable=not sys.stderr.isatty(), leave=False) as bar:
                steps = list(
                    measure_steps(
                        built.engine,
                        shape,
                        repeats=self.repeats,
                        seed=built.config.seed,
                        progress=lambda case: bar.update(),
                    )
                )
        finally:
            built.engine.close()
        about = {"model": model, "date": datetime.date.today().isoformat(), "machine": machine()}
        where = f"{about['machine']['platform']}, {about['machine']['device']}, {about['machine']['cpus']} cores"
        fitted = fit(steps, origin=f"{model} measured on {where}, {about['date']}", engine=shape)
        if moves is not None:  # the engine measured it at its start; the loads move no blocks
            fitted = dataclasses.replace(fitted, per_moved_block=moves.seconds_per_move)
        errors = relative_errors(fitted, steps)
        print(f"{'load':<52}{'tokens':>7}{'rows':>6}{'KV read':>9}{'ms':>9}{'fitted':>9}{'off':>7}")
        for step, error in sorted(zip(steps, errors, strict=True), key=lambda pair: pair[0].case):
            load = step.load
            print(
                f"{step.case:<52}{load.tokens:>7.0f}{load.rows:>6.0f}{load.kv_tokens:>9.0f}{step.seconds * 1e3:>9.3f}"
                f"{fitted.seconds(load) * 1e3:>9.3f}{error:>+7.0%}"
            )
        report = to_json(fitted, steps, about)
        print("Coefficients, seconds:    " + ", ".join(f"{name} {getattr(fitted, name):.3g}" for name in COEFFICIENTS))
        off = report["relative_error"]
        print(f"Relative error:           median {off['median']:.1%}, largest {off['largest']:.1%}")
        print("Machine:                  " + ", ".join(f"{name} {value}" for name, value in about["machine"].items()))
        write_json(self.output_json, report)
        return 0


def engine_shape(runner: Any) -> Any:
    """Return the sizes of a runner's engine as an EngineShape."""
    from jpaged.simulator.step_load import EngineShape

    shapes = [program.shape for program in runner.programs.forwards]
    return EngineShape(
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        max_model_len=runner.max_model_len,
        windows=runner.windows,
        row_buckets=tuple(sorted({shape.rows for shape in shapes if shape.is_decode})),
        token_buckets=tuple(sorted({shape.tokens for shape in shapes if not shape.is_decode})),
        block_bytes=runner.memory_plan.block_bytes,
        num_devices=runner.num_devices,
        num_layers=runner.spec.num_layers,
        hidden_bytes=runner.hidden_bytes,
    )
