"""`jpaged plan`: plans an engine's device memory, without the device and without loading weights.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import contextlib
import dataclasses
import sys
from typing import Annotated, Any

import tyro

from jpaged.cli.common.results import OutputJson, check_writable, write_json
from jpaged.cli.flags.engine import ENGINE_DEFAULTS, EngineArguments, ModelArgument, engine_options, one_line_help

OptionalFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Print how an engine would use a device's memory: weights, temporaries, request table and KV pool.

    Also prints the numbers of tokens and requests that fit, and the largest max_model_len. The engine makes the same
    calculation when it starts. Here it needs no accelerator and loads no weights.

    Example: jpaged plan meta-llama/Llama-3.1-8B --device-memory 24GiB

    Example: jpaged plan Qwen/Qwen3-0.6B --target v5e --max-num-seqs 64 --request-len 2048 8192

    Example: jpaged plan meta-llama/Llama-3.1-8B --target h200 --roofline

    Example: jpaged plan meta-llama/Llama-3.1-70B --target h200 --tensor-parallel-size 8 --roofline
    """

    model_argument: ModelArgument = None
    """Folder, config.json, Hugging Face hub id, .gguf file, or demo. For a hub id, only config.json is downloaded."""

    device_memory: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None
    """Memory of the device: 24GiB, 80GB, or a number of bytes. Default: the target's memory. Without --target, the
    device is an NVIDIA GPU."""

    target: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Device to plan for: h200, h100, a100, a100-40gb, l40s, l4, a10, v5e, v6e, v5p or cpu. Default: JAX's device."""

    request_len: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT [INT ...]", help_behavior_hint="")] = ()
    """Request lengths in tokens, prompt plus output. For each, print the number of requests that can run at once."""

    roofline: bool = False
    """Also compile the programs of a step, and predict their kernels, bytes, and times relative to the device's limits.
    Needs --target and its compiler, jax[cuda13] or jax[tpu]. Takes a minute."""

    roofline_context: Annotated[int, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = 1024
    """Tokens per request in the predicted steps. Default: 1024."""

    link_bandwidth: OptionalFloat = None
    """Bytes per second that each device sends to the others, for --roofline with --tensor-parallel-size. Default: the
    target's usual link (450e9 for h100 and h200)."""

    link_latency: OptionalFloat = None
    """Seconds of one step of a collective. Default: the target's usual link (1.9e-6 for h100 and h200)."""

    output_json: OutputJson = None
    """Write the plan to this file, as JSON."""

    engine: EngineArguments = ENGINE_DEFAULTS

    def run(self) -> int:
        """Print the plan. Returns 2 if the engine would not start."""
        options = engine_options(self.engine, self.model_argument)
        check_writable(self.output_json)
        from jpaged.planning import parse_size, plan

        size = None if self.device_memory is None else parse_size("device_memory", self.device_memory)
        if self.target is not None or size is not None:
            import jax

            # The plan is for a named device. Starting this machine's device would occupy its memory.
            jax.config.update("jax_platforms", "cpu")
        from rich.console import Console

        context = self.roofline_context if self.roofline else None
        bar = self.roofline and sys.stderr.isatty()
        waiting = contextlib.nullcontext() if bar else Console(stderr=True).status("planning: compiling programs")
        with waiting:
            result = plan(
                options.pop("model"), options, target=self.target, device_memory=size, request_lens=self.request_len,
                roofline_context=context, link_bandwidth=self.link_bandwidth, link_latency=self.link_latency,
                progress=bar,
            )  # fmt: skip
        print(text_of(result))
        write_json(self.output_json, plan_fields(result))
        return 0 if result.memory is not None else 2


def text_of(plan: Any) -> str:
    """Return an EnginePlan as text."""
    each = "" if plan.num_devices == 1 else f"each of {plan.num_devices} devices: "
    index, count = plan.stage
    stage = "" if count == 1 else f"stage {index + 1} of {count} ({plan.num_layers} layers), the fullest, "
    lines = [f"{plan.model}, {plan.dtype}, {stage}on {each}{plan.device}", ""]
    total = sum(row.num_bytes for row in plan.rows)
    if plan.device_bytes is not None and plan.memory is not None:
        total = plan.device_bytes
    table = []
    for row in plan.rows:
        table.append((row.name, row.num_bytes, row.note))
        table += [(f"  {part.name}", part.num_bytes, part.note) for part in row.parts]
    if plan.memory is not None:
        table.append(("in all", total, "" if plan.device_bytes is None else "the device's memory"))
    for name, size, note in table:
        lines.append(f"{name:16} {size:>17,} {size / 2**20:>12,.1f} MiB  {note}".rstrip())
    how = "measured" if plan.temporaries.measured else "ESTIMATED, and probably too high"
    lines += ["", f"temporaries are {how}: {plan.temporaries.how}"]
    if plan.format is not None:
        here = "; on this device all of them are dequantised while they load" if plan.is_dequantised else ""
        lines.append(f"weights are quantised in the checkpoint ({plan.format}){here}")
    memory = plan.memory
    if memory is None:
        problem = plan.problem
        if plan.least_devices > 1:
            problem = f"the weights alone need at least {plan.least_devices} such devices (--tensor-parallel-size)"
        lines += ["", f"it does not fit: {problem}"]
    else:
        lines += ["", f"KV cache: {memory.kv_tokens:,} tokens; {memory.request_line()}"]
        lines += [
            f"requests of {length:>9,} tokens at once: {count:>6,}"
            + (" (max_num_seqs)" if count == memory.limits.max_num_seqs else "")
            for length, count in plan.requests
        ]
        if plan.host_blocks:
            tokens = plan.host_blocks * memory.limits.block_size // len(memory.limits.kv_groups.windows)
            lines.append(f"host memory (swap_space): {plan.host_blocks:,} blocks, KV of {tokens:,} tokens")
            if plan.host_snapshots:
                tokens = tokens * plan.host_snapshots * memory.snapshot_interval // plan.host_blocks
                lines.append(
                    f"  or {plan.host_snapshots:,} snapshots of {memory.slot_bytes:,} bytes, with the KV between them "
                    f"({memory.snapshot_interval:,} blocks each): {tokens:,} tokens"
                )
        if plan.adapters is not None:
            size, count = plan.adapters.host_bytes, plan.adapters.host_slots
            lines.append(f"host memory of LoRA adapters (max_cpu_loras): {count:,} adapters, {size / 2**20:,.1f} MiB")
        lines.append(f"max_model_len: {memory.limits.max_model_len:,}")
    if plan.largest_max_model_len is not None:
        lines.append(f"the largest max_model_len that fits: {plan.largest_max_model_len:,}")
    if plan.roofline is not None:
        lines += ["", *_roofline_lines(plan.roofline)]
    return "\n".join(lines)


def _roofline_lines(roofline: Any) -> list[str]:
    lines = [
        f"predicted for {roofline.device}, from the compiled programs. Estimates: nothing was run. Without a device,",
        "matmuls are not tuned. The limit is the longer of two times: to read weights and KV once, and of the matmuls.",
        "Loops with an iteration count known only at run time are not counted. A CUDA graph is one command.",
        "",
        f"{'program':38}{'kernels':>8}{'commands':>9}{'loops':>6}{'GB moved':>9}{'at least':>9}{'ms':>8}{'limit':>8}",
    ]
    for cost in roofline.programs:
        commands = "" if cost.commands is None else cost.commands
        lines.append(
            f"{cost.program:38}{cost.kernels:8}{commands:>9}{cost.loops:6}{cost.bytes_moved / 1e9:9.2f}"
            f"{cost.least_bytes / 1e9:9.2f}{1e3 * cost.seconds:8.2f}{1e3 * cost.least_seconds:8.2f}"
        )
    if roofline.num_devices > 1:
        lines += [
            "",
            f"collectives between {roofline.num_devices} devices, at {roofline.link}. They are part of the ms above,",
            "but not of the limit. The prediction assumes that nothing else runs at the same time.",
            "",
            f"{'program':38}{'kind':>20}{'count':>7}{'MB':>10}{'ms':>8}",
        ]
        lines += [
            f"{cost.program:38}{one.kind:>20}{one.count:7}{one.num_bytes / 1e6:10.2f}{1e3 * one.seconds:8.2f}"
            for cost in roofline.programs for one in cost.collectives
        ]  # fmt: skip
    chosen = [f"{cost.program}: {cost.experts_read:.1f}" for cost in roofline.programs if cost.experts_read is not None]
    if chosen:
        lines += ["", "expected number of experts read per layer, if all experts are equally likely:", *chosen]
    lines += ["", f"{'a step of decodes, ms':38}{'limit':>8}{'greedy':>9}{'random':>9}{'tokens/s, greedy':>19}"]
    drafts = any(step.load.drafts for step in roofline.steps)
    for step in roofline.steps:
        name = f"{step.load.rows} row{'s'[: step.load.rows - 1]} of {step.load.context:,} tokens"
        name += f" with {step.load.drafts} drafts" if step.load.drafts else ""
        rate = step.load.rows * (1 + step.load.drafts) / step.greedy_seconds
        lines.append(
            f"{name:38}{1e3 * step.least_seconds:8.2f}{1e3 * step.greedy_seconds:9.2f}{1e3 * step.random_seconds:9.2f}"
            f"{rate:19,.0f}"
        )
    if drafts:
        lines += ["", "With drafts: if the model accepts all of them, and without the time of a drafter."]
    return lines


def plan_fields(plan: Any) -> dict[str, Any]:
    """Return an EnginePlan as JSON data."""
    memory = plan.memory
    fields: dict[str, Any] = {
        "model": plan.model,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "device": plan.device,
        "device_bytes": plan.device_bytes,
        "usable_bytes": plan.usable_bytes,
        "rows": [dataclasses.asdict(row) for row in plan.rows],
        "temporaries": dataclasses.asdict(plan.temporaries),
        "format": plan.format,
        "least_devices": plan.least_devices,
        "num_devices": plan.num_devices,
        "pipeline_stage": plan.stage[0],
        "pipeline_stages": plan.stage[1],
        "whole_bytes": plan.whole_bytes,
        "largest_max_model_len": plan.largest_max_model_len,
        "fits": memory is not None,
        "problem": plan.problem,
        "adapters": None if plan.adapters is None else dataclasses.asdict(plan.adapters),
        "roofline": None if plan.roofline is None else dataclasses.asdict(plan.roofline),
    }
    if memory is None:
        return fields
    return fields | {
        "weight_bytes": memory.weight_bytes,
        "temp_bytes": memory.temp_bytes,
        "table_bytes": memory.table_bytes,
        "state_bytes": memory.state_bytes,
        "num_snapshots": memory.limits.num_snapshots,
        "kv_bytes": memory.kv_bytes,
        "drafter_bytes": memory.drafter_bytes,
        "num_blocks": memory.num_blocks,
        "block_bytes": memory.block_bytes,
        "block_size": memory.limits.block_size,
        "kv_tokens": memory.kv_tokens,
        "host_blocks": plan.host_blocks,
        "host_snapshots": plan.host_snapshots,
        "max_model_len": memory.limits.max_model_len,
        "max_num_seqs": memory.limits.max_num_seqs,
        "max_num_batched_tokens": memory.limits.max_num_batched_tokens,
        "requests": [{"tokens": length, "at_once": count} for length, count in plan.requests],
    }
