"""Write the fields of `EngineArguments`, which type checkers read, from the options of the engine.

    python tools/write_engine_arguments.py           # write the file
    python tools/write_engine_arguments.py --check   # exit with 1 if it differs

An option is declared once, as a field of `EngineConfig`. jpaged/frontend/engine_config.py has the names of vLLM.
"""

import argparse
import ast
import inspect
import sys
from pathlib import Path

from jpaged.config import EngineConfig
from jpaged.frontend.engine_config import ALIASES, NOT_YET, SPECULATION_KEYS

PATH = Path(__file__).resolve().parents[1] / "jpaged/engine_arguments.py"
PARAMETERS = {"model"}  # of `LLM` itself
# Types that callers may pass.
WIDER = {
    "tuple[int, ...] | None": "Sequence[int] | None",
    "SpeculationConfig | None": "SpeculationConfig | Mapping[str, Any] | None",
}


def types() -> dict[str, str]:
    """Type of each field of `EngineConfig`, as written in its source."""
    [declared] = ast.parse(inspect.getsource(EngineConfig)).body
    assert isinstance(declared, ast.ClassDef)
    fields = (line for line in declared.body if isinstance(line, ast.AnnAssign))
    return {ast.unparse(field.target): ast.unparse(field.annotation) for field in fields}


def text() -> str:
    """The file's text. Everything up to the docstring of the class stays as it is."""
    before = PATH.read_text(encoding="utf-8")
    declared = ast.parse(before).body[-1]
    assert isinstance(declared, ast.ClassDef)
    head = "".join(before.splitlines(keepends=True)[: declared.body[0].end_lineno]) + "\n"
    options = types()
    lines = [f"{name}: {WIDER.get(kind, kind)}" for name, kind in options.items() if name not in PARAMETERS]
    lines += ["logits_processors: Sequence[Any]", "", f"# vLLM's names of {', '.join(ALIASES.values())}."]
    lines += [f"{name}: {options[field].removesuffix(' | None')} | None" for name, field in ALIASES.items()]
    lines += ["", "# vLLM's short forms of keys of speculative_config."]
    lines += [f"{name}: {'int' if name == 'spec_tokens' else 'str'} | None" for name in SPECULATION_KEYS]
    lines += ["", "# Options of vLLM that jpaged does not have yet. Only their neutral values are accepted."]
    lines += [f"{name}: Any" for name in NOT_YET]
    return head + "".join(f"    {line}\n" if line else "\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    if not arguments.check:
        PATH.write_text(text(), encoding="utf-8")
    return int(PATH.read_text(encoding="utf-8") != text())


if __name__ == "__main__":
    sys.exit(main())
