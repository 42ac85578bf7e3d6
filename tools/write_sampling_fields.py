"""Write the HTTP fields and the table of the docs of the parameters that `SamplingParams` declares.

    python tools/write_sampling_fields.py           # write the files
    python tools/write_sampling_fields.py --check   # exit with 1 if one differs
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from jpaged.cli.flags.engine import field_docs
from jpaged.cli.flags.sampling import SamplingFlags
from jpaged.params.sampling import NOT_BUILT, PARAMETERS, SamplingParams
from jpaged.serving.schemas.requests import ChatRequest, CompletionRequest

ROOT = Path(__file__).resolve().parents[1]
FIELDS, DOCS = ROOT / "serving/schemas/requests.py", ROOT / "docs/sampling.md"
TYPES: dict[Any, str] = {
    kind: name for base, name in ((int, "Int"), (float, "float"), (bool, "bool")) for kind in (base, base | None)
}
OWN_FLAGS = {"seed": "sampling_seed"}
TITLE, HEAD = "## All parameters\n\n", "| Field | Default | Flag | |\n|---|---|---|---|\n"


FIRST, LAST = "    # tools/write_sampling_fields.py writes these from SamplingParams.\n", "    # Until here.\n"
# Type of each of these fields.
HTTP = {
    field.name: TYPES[field.type] for field in dataclasses.fields(SamplingParams)
    if field.type in TYPES and PARAMETERS[field.name].http and field.name not in NOT_BUILT
}  # fmt: skip


def fields_text() -> str:
    """Text of the structs' file, with the fields between the two comments."""
    before, _, rest = FIELDS.read_text(encoding="utf-8").partition(FIRST)
    fields = "".join(f"    {name}: {kind} | None = None\n" for name, kind in HTTP.items())
    return before + FIRST + fields + LAST + rest.partition(LAST)[2]


def docs_text() -> str:
    """Text of the docs, with one row for each parameter."""
    docs, flags = field_docs(SamplingParams), SamplingFlags.__dataclass_fields__
    http = {*HTTP, *CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    before = DOCS.read_text(encoding="utf-8").partition(TITLE)[0]
    rows = []
    for field in dataclasses.fields(SamplingParams):
        if field.name not in NOT_BUILT:
            flag = OWN_FLAGS.get(field.name, field.name)
            shown = f"`--{flag.replace('_', '-')}`" if flag in flags else ""
            python = "" if field.name in http else "Python only. "
            default = getattr(field.default, "name", field.default)
            rows.append(f"| `{field.name}` | {default} | {shown} | {python}{docs[field.name]} |\n")
    return "".join((before, TITLE, HEAD, *rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    differs = False
    for path, text in ((FIELDS, fields_text()), (DOCS, docs_text())):
        differs |= path.read_text(encoding="utf-8") != text
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
    return int(arguments.check and differs)


if __name__ == "__main__":
    sys.exit(main())
