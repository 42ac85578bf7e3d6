"""Tour of lm-eval's `local-completions`: multiple choice, perplexity and generation, on tasks defined here.

Log-likelihoods must equal `prompt_logprobs` of an offline `LLM`, which runs in the engine's own environment.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import BASE, MODEL, Checks

QUESTIONS = [
    ("import os\nfor name in os.", ["listdir(path):", "zebra zebra", "environ:"], 0),
    ("def add(a, b):\n    return a", [" + b", " ->", " while"], 0),
    ("if x is not", [" None:", " import", " def"], 0),
    ("try:\n    import json\nexcept", [" ImportError:", " lambda", " 17"], 0),
    ("class Error(", ["Exception):", "+++", "for"], 0),
    ("with open(path) as", [" f:", " return", " =="], 0),
]  # fmt: skip
CHOICE = """\
task: jpaged_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
GENERATE = """\
task: jpaged_generate
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
target_delimiter: ""
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, temperature: 0, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
ROLLING = """\
task: jpaged_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{choices[0]}}"
metric_list:
  - {metric: byte_perplexity}
"""
OFFLINE = """\
import json, sys
import jpaged
pairs, prompts, texts = json.load(open(sys.argv[1]))
with jpaged.LLM("demo", max_num_seqs=16, token_buckets=(128,), row_buckets=(16,), max_num_batched_tokens=128) as llm:
    tokenizer = llm.get_tokenizer()
    sums = []
    for context, continuation in pairs:
        head = tokenizer.encode(context)
        ids = tokenizer.encode(context + continuation)
        params = jpaged.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        found = llm.generate({"prompt_token_ids": ids}, params)[0].prompt_logprobs
        parts = [found[at][ids[at]].logprob for at in range(len(head), len(ids))]
        greedy = all(found[at][ids[at]].rank == 1 for at in range(len(head), len(ids)))
        sums.append([sum(parts), greedy])
    rolling = []
    for text in texts:
        ids = [tokenizer.eos_token_id, *tokenizer.encode(text)]
        params = jpaged.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        found = llm.generate({"prompt_token_ids": ids}, params)[0].prompt_logprobs
        rolling.append(sum(found[at][ids[at]].logprob for at in range(1, len(ids))))
    params = jpaged.SamplingParams(max_tokens=12, temperature=0, stop=["\\n"])
    answers = [llm.generate(prompt, params)[0].outputs[0].text for prompt in prompts]
json.dump({"sums": sums, "texts": answers, "rolling": rolling}, open(sys.argv[2], "w"))
"""
TASKS = ("jpaged_choice", "jpaged_generate", "jpaged_rolling")
TOLERANCE = 1e-3  # of a sum of log-probabilities: other batches add the terms of a matmul in another order


def offline() -> dict[str, Any]:
    """Log-likelihoods of choices and texts, and greedy continuations, from the engine without a server."""
    pairs = [(question, choice) for question, choices, _ in QUESTIONS for choice in choices]
    questions = [question for question, _, _ in QUESTIONS]
    texts = [question + choices[0] for question, choices, _ in QUESTIONS]
    Path("pairs.json").write_text(json.dumps([pairs, questions, texts]))
    Path("offline.py").write_text(OFFLINE)
    command = [os.environ["TOUR_ENGINE_PYTHON"], "offline.py", "pairs.json", "offline.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(Path("offline.json").read_text())


def evaluate(batch_size: int, num_concurrent: int) -> dict[str, Any]:
    """Run the tasks with lm-eval's command line. Returns the results of each task, with its samples in `samples`."""
    folder = Path(tempfile.mkdtemp(dir="."))
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--include_path", "tasks",
        "--tasks", *TASKS, "--batch_size", str(batch_size), "--model_args", f"model={MODEL}",
        f"base_url={BASE}/v1/completions", "max_length=2048", f"num_concurrent={num_concurrent}",
        "--log_samples", "--output_path", str(folder),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-1200:]
    (results,) = folder.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    for task in TASKS:
        (samples,) = folder.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        found[task]["samples"] = sorted(lines, key=_number)
    return found


def _pair(response: Any) -> Any:
    """The log-likelihood of a response: lm-eval writes a number, or a list that begins with it."""
    return _pair(response[0]) if isinstance(response, list) else response


def _number(sample: dict[str, Any]) -> int:
    return sample["doc_id"]


def write_tasks() -> None:
    """Write the data and the three task files into the working folder."""
    data = Path("data.jsonl").resolve()
    data.write_text("".join(json.dumps({"question": q, "choices": c, "answer": a}) + "\n" for q, c, a in QUESTIONS))
    Path("tasks").mkdir()
    for text in (CHOICE, GENERATE, ROLLING):
        name = text.split()[1]
        Path("tasks", f"{name}.yaml").write_text(text.replace("DATA", str(data)))


def compare_choices(found: dict[str, Any], wanted: list[list[Any]]) -> float:
    """Compare the log-likelihoods of all choices with the engine's. Returns the largest difference."""
    got = [pair[0] for sample in found["samples"] for pair in sample["resps"]]
    assert len(got) == len(wanted)
    differences = [abs(float(value) - sums) for (value, _), (sums, _) in zip(got, wanted, strict=True)]
    assert max(differences) < TOLERANCE, differences
    for (_, greedy), (_, expected) in zip(got, wanted, strict=True):
        assert str(greedy) == str(expected)
    return max(differences)


def main() -> None:
    checks = Checks()
    write_tasks()
    wanted = offline()
    largest = []
    ways = {"one at a time": (1, 1), "batches of 4": (4, 1), "4 requests at once": (1, 4)}
    for name, (batch_size, num_concurrent) in ways.items():
        found: dict[str, Any] = {}
        with checks.check(f"lm_eval run with the server's tokenizer, {name}"):
            found = evaluate(batch_size, num_concurrent)
        with checks.check(f"multiple choice, {name}: log-likelihoods equal LLM's prompt_logprobs"):
            largest.append(compare_choices(found["jpaged_choice"], wanted["sums"]))
            assert found["jpaged_choice"]["acc,none"] > 0.5
        with checks.check(f"generate_until, {name}: texts equal LLM.generate's"):
            assert [sample["resps"][0][0] for sample in found["jpaged_generate"]["samples"]] == wanted["texts"]
        with checks.check(f"loglikelihood_rolling, {name}: log-likelihoods equal LLM's prompt_logprobs"):
            got = [float(_pair(sample["resps"][0])) for sample in found["jpaged_rolling"]["samples"]]
            assert max(abs(one - other) for one, other in zip(got, wanted["rolling"], strict=True)) < TOLERANCE, got
    checks.extra["largest_difference"] = max(largest, default=None)
    checks.write()


if __name__ == "__main__":
    main()
