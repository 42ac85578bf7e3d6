"""Are compiled programs the same before and after a change that moves code?

    python tools/same_programs.py before            # at the old commit
    python tools/same_programs.py after             # at the new one
    python tools/same_programs.py after --compare before

Writes the text of every program of some models to a folder, without metadata and source positions. `--target h200` or
`--target v5e` compiles without the device, and needs JAX's package for it.
"""

import argparse
import base64
import json
import pathlib
import re
import sys
import tempfile
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu
from jaxlib.triton import dialect as triton
from tqdm import tqdm

from jpaged.config import EngineConfig
from jpaged.models.sharding import shards_of
from jpaged.runtime.compile.blueprint import Blueprint, ServedModel
from jpaged.runtime.placement import Placement
from jpaged.runtime.targets import TARGETS, Target

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # tests have the models
from jpaged.loading.model_description import describe
from tests.golden.checkpoints import BY_NAME
from tests.golden.pooling import QWEN3_CLASSIFIER

MODELS: dict[str, dict[str, Any]] = {
    name: BY_NAME[name].config for name in ("llama", "gemma3", "gpt2", "mixtral", "deepseek-v3", "gpt-oss")
} | {"classifier": QWEN3_CLASSIFIER.config}
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
BLOCKS = 64
# Tables of source positions, and references to them.
TABLES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*\n?", re.MULTILINE)
PLACES = re.compile(r",? ?(metadata=\{[^{}]*\}|stack_frame_id=\d+|source_(file|line)=[^ ,}]+)")
SOURCES = re.compile(r"(?<=kernel\.)[0-9a-f]{16}(?=\")")  # digest of a native kernel's sources, comments included
FINGERPRINT = re.compile(r"frontend_attributes=\{fingerprint_before_lhs=\"\w+\"\}")
# Bytecode of a Pallas kernel, which has source positions too. Triton's is escaped, Mosaic's is base64.
TRITON = re.compile(r'(?<=")ML\\EFR(?:[^"\\]|\\.)*(?=")')
MOSAIC = re.compile(r'(?<=")TUzvUg[\w+/=]*(?=")')
ESCAPED = re.compile(rb'\\([0-9A-F]{2}|[\\"])')


def without_places(text: str) -> str:
    """The text of a program without metadata, source positions, and digests of sources. Kernels are readable."""
    text = FINGERPRINT.sub("", SOURCES.sub("", PLACES.sub("", TABLES.sub("", text))))
    text = TRITON.sub(lambda found: kernel_text(unescaped(found[0].encode("latin-1"))), text)
    return MOSAIC.sub(lambda found: kernel_text(base64.b64decode(found[0])), text)


def unescaped(text: bytes) -> bytes:
    """The bytes of a string in HLO text, whose escapes are two hexadecimal digits, a backslash or a quote."""
    return ESCAPED.sub(lambda found: found[1] if len(found[1]) == 1 else bytes.fromhex(found[1].decode()), text)


def kernel_text(bytecode: bytes) -> str:
    """The text of an MLIR module without locations."""
    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        triton.register_dialect(context)
        tpu.register_dialect(context)
        return str(ir.Module.parse(bytecode))


def programs(config: dict[str, Any], target: Target) -> dict[str, str]:
    """Text of each program of a model, by its shape."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "config.json")
        path.write_text(json.dumps(config))
        engine = EngineConfig(model=str(path), **OPTIONS)
        placement = Placement.for_target(target, shards_of(engine))
        described = describe(engine, target.platform, [placement.mesh])
    blueprint = Blueprint.draw(ServedModel(described.spec, described.params), engine, placement)
    build, texts = blueprint.with_blocks(BLOCKS), {}
    for shape in blueprint.program_shapes:
        with target.tracing():
            texts[str(shape)] = without_places(build.compile(shape).as_text() or "")
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--compare", type=pathlib.Path, metavar="FOLDER", help="an earlier folder; nothing is compiled")
    parser.add_argument("--target", default="cpu", choices=list(TARGETS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = ({file.name: file.read_text() for file in folder.glob("*.txt")}
                         for folder in (arguments.compare, arguments.folder))  # fmt: skip
        differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        print(f"{len(before)} programs before, {len(after)} after, {len(differing)} differ", *differing, sep="\n")
        return 1 if differing or not before else 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in tqdm(arguments.models, unit="model"):
        for shape, text in programs(MODELS[name], TARGETS[arguments.target]).items():
            (arguments.folder / f"{arguments.target}, {name}, {shape}.txt").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
