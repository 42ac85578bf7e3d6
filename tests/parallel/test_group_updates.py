"""New weights for an engine of two real processes: paths and arrays, while requests run, with errors and lost nodes."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from benchmarks.process_chaos import free_port
from jpaged import LLM
from jpaged.engine.step_plan import SamplerVariant
from tests.golden.checkpoints import BY_NAME, write_checkpoint
from tests.support.tiny_engine import sampling_programs
from tests.support.update_nodes import FEW, HERE, NUM_TOKENS, PROMPTS, SIZES, greedy

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="a path below /proc")]


def write_folders(folder: pathlib.Path) -> None:
    """The checkpoints of `update_nodes`, and a folder of each node."""
    for seed, name in enumerate(("old", "new")):
        write_checkpoint(BY_NAME["llama"], seed, folder / name)
    write_checkpoint(BY_NAME["qwen2"], 0, folder / "other")
    for copy in ("node0/alone", "node0/different", "node1/different"):
        shutil.copytree(folder / "new", folder / copy)
    shutil.copytree(folder / "new", folder / "node0/stale")
    shutil.copytree(folder / "old", folder / "node1/stale")
    with folder.joinpath("node1/different/config.json").open("a") as config:
        config.write("\n")


def run_nodes(folder: pathlib.Path) -> tuple[dict[str, dict], list[int], list[str]]:
    """Lines of node 0 by name, statuses and logs."""
    port = free_port(2)
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    nodes = []
    for rank in (0, 1):
        command = [sys.executable, "-m", "tests.support.update_nodes", str(rank), str(port), str(folder)]
        with (folder / f"log{rank}").open("w") as log, (folder / f"out{rank}").open("w") as out:
            env = os.environ | {"PYTHONPATH": path}
            nodes.append(subprocess.Popen(command, stdout=out, stderr=log, env=env, cwd=folder / f"node{rank}"))
    try:
        statuses = [node.wait(150) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    logs = [folder.joinpath(f"log{rank}").read_text() for rank in (0, 1)]
    lines = [json.loads(line) for line in folder.joinpath("out0").read_text().splitlines() if line.startswith("{")]
    return {line.pop("name"): line for line in lines}, statuses, logs


class OneProcess:
    """An engine of one process, with the same number of devices."""

    def __init__(self, llm: LLM, folder: pathlib.Path):
        self.llm, self.folder, self.served = llm, folder, "old"

    def serve(self, name: str) -> None:
        if name != self.served:
            self.llm.update_weights(self.folder / name)
            self.served = name

    def answer(self, name: str, prompt: list[int], count: int = FEW) -> list[int]:
        self.serve(name)
        return self.llm.generate({"prompt_token_ids": prompt}, greedy(count), use_tqdm=False)[0].outputs[0].token_ids

    def kept(self, prompt: list[int], first: int) -> list[int]:
        """The answer if the weights change after `first` tokens, and the KV is kept."""
        self.serve("old")
        engine, ids = self.llm.engine, list[int]()
        engine.add_request("kept", {"prompt_token_ids": prompt}, greedy(NUM_TOKENS), stream=True)
        while len(ids) < first - 1:
            for output in engine.step():
                ids = output.outputs[0].token_ids
        for output in engine.flush():
            ids = output.outputs[0].token_ids
        assert len(ids) == first
        [of_engine] = self.llm._prepared(str(self.folder / "new"), None, None)
        engine.update_weights(of_engine())
        self.served = "new"
        while engine.has_work:
            for output in engine.step():
                ids = output.outputs[0].token_ids
        return ids


def check_running(told: dict[str, dict], one: OneProcess) -> None:
    """Answers that the four modes of an update have changed."""
    counts = dict.fromkeys(("recompute", "keep", "wait", "abort"), 0)
    for mode in counts:
        assert told[mode]["answer"]["ids"] == one.answer("new", PROMPTS[0]), mode
        for prompt, answer in zip(PROMPTS, told[mode]["running"], strict=True):
            ids, changes = answer["ids"], answer["changes"]
            if mode == "abort" and answer["reason"] == "abort":
                counts[mode] += 1
                assert ids == one.answer("old", prompt, len(ids))
            elif len(changes) == 1:
                counts[mode] += mode == "wait"
                assert ids == one.answer("old", prompt, NUM_TOKENS)
            else:
                counts[mode] += 1
                [_, (first, version)] = changes
                assert version == mode
                if mode == "keep":
                    assert ids == one.kept(prompt, first)
                else:
                    assert ids[:first] == one.answer("old", prompt, first)
                    assert ids[first:] == one.answer("new", prompt + ids[:first], NUM_TOKENS - first)
    assert min(counts.values()) > 0, counts


def check_refused(told: dict[str, dict], old: list[int], folder: pathlib.Path) -> None:
    """Updates that do not fit leave the old weights on all nodes."""
    refused = {
        "path alone": f"node 1: {HERE}/alone: there is no such file or folder",
        "path different": f"node 1: {HERE}/different has other files than on node 0",
        "path stale": f"node 1: {HERE}/stale has other files than on node 0",
        "path other": f"{folder}/other: the weights are of another model",
        "path none": f"{folder}/none: there is no such file or folder",
        "spread tree": "has parts in other processes",
        "spread name": "has parts in other processes",
        "wrong shape": "model.norm.weight has shape [3]",
    }
    for name, message in refused.items():
        line = told[name]
        assert (line["error"], line["problem"]) == ("ModelLoadError", None), name
        assert message in line["message"], line["message"]
        assert line["answer"]["ids"] == old, name


def check_failures(told: dict[str, dict], new: list[int]) -> None:
    """An update that fails in the middle on a node is refused until the next one succeeds."""
    messages = {
        "early end": "the iterator has ended without", "failed path": "node 1: ValueError: the leaf cannot be read",
        "failed arrays": "node 1: ValueError: the leaf cannot be read",
    }  # fmt: skip
    for name, message in messages.items():
        assert message in told[name]["message"]
        assert "only a part of them was replaced" in told[name]["problem"]
        assert told[name]["answer"]["error"] == "NoWeightsError"
    for name in ("failed path", "failed arrays"):
        assert told[f"after {name}"]["answer"]["ids"] == new


def test_two_processes_get_new_weights(tmp_path):
    write_folders(tmp_path)
    told, statuses, logs = run_nodes(tmp_path)
    assert "compiles" in told, "\n".join(logs)
    with sampling_programs(SamplerVariant.GREEDY):
        llm = LLM(str(tmp_path / "old"), **SIZES)
    with llm:
        one = OneProcess(llm, tmp_path)
        old, new = (one.answer(name, PROMPTS[0]) for name in ("old", "new"))
        assert told["start"]["answer"]["ids"] == old != new
        check_refused(told, old, tmp_path)
        check_running(told, one)
    answers = {"iterator": new, "old path": old, "jax arrays": new, "trainer": new, "repaired": old, "level 2": new}
    for name, ids in answers.items():
        assert (told[name]["version"], told[name]["references"]) == (name, 0)
        assert told[name]["answer"]["ids"] == ids, name
        assert told[name]["answer"]["changes"] == [[0, name]]
    check_failures(told, new)
    assert told["awake 1"]["answer"]["ids"] == told["awake 2"]["answer"]["ids"] == new
    assert told["compiles"]["number"] == 0
    # node 1 has ended in the middle of the last update
    assert "never" not in told
    assert statuses == [1, 9]
    assert "node 1 of 2 is lost" in logs[0]
