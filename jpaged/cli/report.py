"""`jpaged report`: writes what is needed to find out why a device does not work."""

import dataclasses
import pathlib
from typing import Annotated, Any

import tyro

from jpaged.cli.flags import one_line_help
from jpaged.cli.results import check_writable, machine, write_json


@one_line_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Check the kernels on this machine's device and write a report: versions, device, driver, results, errors.

    Attach the file to an issue. It holds no prompts and no models, and of the environment only variables that set up
    JAX and the device. Each kernel that the device takes is compiled and run: the time depends on their number, and on
    how fast this machine compiles.

    Example: jpaged report
    """

    output: Annotated[pathlib.Path, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = pathlib.Path(
        "jpaged-report.json"
    )
    """Write the report to this file, as JSON. Default: jpaged-report.json."""

    def run(self) -> int:
        """Check, print and write. The exit status is 1 if a check failed, or if no device starts."""
        check_writable(self.output, "output")
        from jpaged.diagnosis import diagnose

        found = diagnose()
        found["machine"] = machine() if found["device"] else {}
        print(text_of(found))
        write_json(self.output, found)
        print(f"written to {self.output}")
        return 1 if not found["checks"] or any("error" in check for check in found["checks"]) else 0


def text_of(found: dict[str, Any]) -> str:
    """The report in lines."""
    about = found["machine"] or found["versions"]
    lines = [", ".join(f"{name} {value}" for name, value in about.items())]
    if found["nvidia_driver"]:
        lines.append(f"NVIDIA driver {found['nvidia_driver']}")
    if found["problem"]:
        lines.append(f"problem: {found['problem']}")
    for check in found["checks"]:
        result = check.get("error") or f"agrees with the reference, largest difference {check['difference']:.2g}"
        lines.append(f"  {check['implementation']:13} {check['shape']:8} {check['seconds']:6.1f} s  {result}")
    return "\n".join(lines)
