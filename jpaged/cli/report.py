"""`jpaged report`: writes a report for finding out why a device does not work.

Imported late: what `run` needs, so that `--help` and mistakes are answered at once.
"""

import dataclasses
import pathlib
from typing import Annotated, Any

import tyro

from jpaged.cli.common.results import check_writable, machine, write_json
from jpaged.cli.flags.engine import one_line_help


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Check the kernels on this machine's device and write a report: versions, device, driver, results, errors.

    Attach the file to an issue. It has no prompts, no models, and only environment variables that configure JAX and the
    device. Each kernel for the device is compiled and run, which takes 10 to 20 s on a CPU. Results are written one by
    one: `left` in the file is the number of remaining checks.

    Example: jpaged report
    """

    output: Annotated[pathlib.Path, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = pathlib.Path(
        "jpaged-report.json"
    )
    """Write the report to this file, as JSON. Default: jpaged-report.json."""

    def run(self) -> int:
        """Check the kernels. Returns 1 if a check failed, or if no device starts."""
        check_writable(self.output, "output")
        print("reading versions and the device", flush=True)
        from jpaged.diagnosis import diagnose

        found: dict[str, Any] = {"checks": [], "left": 0}
        for found in diagnose():
            if "machine" not in found:
                found["machine"] = machine() if found["device"] else {}
                print(facts_of(found), flush=True)
                print(f"checking {found['left']} kernels; each result is added to {self.output}", flush=True)
            else:
                print(line_of(found["checks"][-1]), flush=True)
            write_json(self.output, found)
        print(f"complete: {self.output}")
        return 1 if not found["checks"] or any("error" in check for check in found["checks"]) else 0


def facts_of(found: dict[str, Any]) -> str:
    """Facts about the machine, as text."""
    about = found["machine"] or found["versions"]
    lines = [", ".join(f"{name} {value}" for name, value in about.items())]
    if found["nvidia_driver"]:
        lines.append(f"NVIDIA driver {found['nvidia_driver']}")
    if found["problem"]:
        lines.append(f"problem: {found['problem']}")
    return "\n".join(lines)


def line_of(check: dict[str, Any]) -> str:
    """Result of one check, as one line."""
    result = check.get("error") or f"agrees with the reference, largest difference {check['difference']:.2g}"
    return f"  {check['implementation']:13} {check['shape']:8} {check['seconds']:6.1f} s  {result}"
