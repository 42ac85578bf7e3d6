"""Records Transformers' beam search on tiny models and on tables.

    python tools/record_beams.py      # needs the extra `reference` (torch)

Models: prompts around a block boundary, float32 on one CPU thread. End tokens are chosen from the tokens of the
beams. An answer is recorded only if three conditions hold:
- Hypotheses ended at different times before `max_new_tokens`.
- Beams forked again after the first step.
- No decision was so close that rounding could change it.

Tables: the search alone, on log-probabilities that are bit-identical on all machines, without exact ties.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.golden.beams import ANSWERS, TABLE_ENDS, TABLE_PROMPT, TABLE_VOCAB, BeamParams, beam_prompt, table
from tests.golden.checkpoints import BY_NAME, write_checkpoint

NAMES = ("llama", "gpt2", "qwen3", "gemma2", "gemma3", "mistral-window", "qwen3-moe")
CASES_OF_EACH = 11
NUM_TABLES = 170
PROMPT_LENGTHS = (1, 15, 16, 17, 40)
MIN_MARGIN = 1e-4  # smallest margin of a decision, in log-probability or score; rounding is about 1e-5
MAX_TRIES = 30     # choices of end tokens tried per case


class Watch:
    """Records margins of decisions, ends of hypotheses and forks of a search. Wraps three methods of the model."""

    def __init__(self, model: Any, params: BeamParams):
        self.margin = float("inf")        # smallest margin of all decisions
        self.end_lengths: list[int] = []  # lengths of hypotheses that an end token ended before the last step
        self.forks = 0                    # steps after the first in which a live beam had two or more successors
        self.chosen: list[list[int]] = [] # tokens of the live beams, by step
        self._params = params
        self._last_scores: list[float] = []
        kind = type(model)
        self._get_top_k = kind._get_top_k_continuations.__get__(model)
        self._update = kind._update_finished_beams.__get__(model)
        self._check = kind._check_early_stop_heuristic
        model._get_top_k_continuations = self.get_top_k
        model._update_finished_beams = self.update
        model._check_early_stop_heuristic = self.check

    def finish(self) -> None:
        """Record the margins of the order of the returned sequences."""
        self._note(a - b for a, b in itertools.pairwise(self._last_scores[: self._params.num_return_sequences + 1]))

    def get_top_k(self, **arguments: Any) -> Any:
        width = self._params.width
        length = arguments["cur_len"] + 1 - arguments["decoder_prompt_len"]
        sums, order = arguments["accumulated_log_probs"][0].double().sort(descending=True)
        ids = order % (len(sums) // width)
        ends = torch.isin(ids, torch.tensor(self._params.end_token_ids, dtype=ids.dtype))
        if length == self._params.max_new_tokens:
            ends[:] = True
        self._note((sums[:width][ends[:width]] - sums[width]).tolist())
        self._note((sums[width - 1] - sums[width:][ends[width:]]).tolist()[:1])
        going_on = sums[~ends]
        if len(going_on):
            self._note([float(going_on[width - 1] - going_on[width])])
            self.chosen.append(ids[~ends][:width].tolist())
            parents = (order // (len(sums) // width))[~ends][:width].tolist()
            self.forks += length > 1 and len(set(parents)) < width
        return self._get_top_k(**arguments)

    def update(self, **arguments: Any) -> Any:
        width = self._params.width
        length = arguments["cur_len"] + 1 - arguments["decoder_prompt_len"]
        just_now = arguments["next_token_hits_stopping_criteria"][0][:width]
        new = arguments["topk_log_probs"][0][:width][just_now] / length**self._params.length_penalty
        if length < self._params.max_new_tokens:
            self.end_lengths += [length] * len(new)
        old = arguments["beam_scores"][0][arguments["is_sent_finished"][0]]
        scores = sorted([*old.tolist(), *new.tolist()], reverse=True)
        self._note([scores[width - 1] - scores[width]] if len(scores) > width else [])
        self._last_scores = scores[:width]
        return self._update(**arguments)

    def check(self, **arguments: Any) -> Any:
        params, length = self._params, arguments["cur_len"] - arguments["decoder_prompt_len"]
        decides = arguments["is_sent_finished"].all() and params.early_stopping is not True
        if decides and length < params.max_new_tokens:
            longest = params.early_stopping == "never" and params.length_penalty > 0
            best = arguments["running_beam_scores"][0, 0] / (
                (params.max_new_tokens if longest else length) ** params.length_penalty
            )
            self._note([abs(float(best - arguments["beam_scores"].min()))])
        return self._check(**arguments)

    def _note(self, margins: Any) -> None:
        self.margin = min([self.margin, *margins])


@dataclasses.dataclass(frozen=True)
class Search:
    """Parameters and results of one search."""

    params: BeamParams
    answers: list[list[Any]]  # per returned sequence: token ids, score, sum of log-probabilities, beam indices
    watch: Watch

    @property
    def num_stopped(self) -> int:
        """Number of returned sequences that end with an end token."""
        return sum(answer[0][-1] in self.params.end_token_ids for answer in self.answers)


class Table(transformers.LogitsProcessor):
    """Replaces the model's log-probabilities with those of a table."""

    def __init__(self, seed: int):
        self._table = torch.tensor(table(seed))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return self._table[input_ids[:, -2], input_ids[:, -1]]


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    numbers = itertools.count()
    models = [line for name in NAMES for line in record_model(name, numbers)]
    tables = list(record_tables())
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__}
    head = f'{{"versions": {json.dumps(versions)}'
    ANSWERS.write_text(f'{head},\n"models": [\n{joined(models)}\n],\n"tables": [\n{joined(tables)}\n]}}\n')
    print(f"{len(models)} searches with models, {len(tables)} with tables, {ANSWERS.stat().st_size:,} bytes")


def record_model(name: str, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield the cases of a variant. Prints the margin, forks and ends of each."""
    variant = BY_NAME[name]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(variant, json.loads(variant.answers.read_text())["seed"], Path(folder))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    num_recorded = 0
    while num_recorded < CASES_OF_EACH:
        k = next(numbers)
        width = (2, 4, 10)[k % 3]
        params = BeamParams(
            width=width, num_return_sequences=1 if k % 7 == 0 else width, length_penalty=(0.0, 0.6, 1.0, 2.0)[k % 4],
            early_stopping=(False, True, "never")[(k + k // 3) % 3], max_new_tokens=(40, 24, 12)[k // 5 % 3],
            end_token_ids=(),
        )  # fmt: skip
        length = PROMPT_LENGTHS[k % 5]
        prompt = beam_prompt(name, length)
        found = []
        for end_token_ids in end_tokens(model, prompt, params, k):
            search = ask(model, prompt, dataclasses.replace(params, end_token_ids=end_token_ids))
            watch = search.watch
            if watch.margin > MIN_MARGIN and watch.forks > 1 and len(set(watch.end_lengths)) > 1:
                found.append(search)
                if search.num_stopped:  # may stay 0 with a high length penalty
                    break
        if not found:
            print(f"{name:15} {length:3} {params}  left out: no useful end tokens in {MAX_TRIES} choices", flush=True)
            continue
        num_recorded += 1
        search, watch = found[-1], found[-1].watch
        print(
            f"{name:15} {length:3} {search.params}  margin {watch.margin:.1e}  forks {watch.forks}  "
            f"ended at {watch.end_lengths}, returned {search.num_stopped}", flush=True,
        )  # fmt: skip
        yield {
            "variant": name, "prompt_len": length, "params": dataclasses.astuple(search.params),
            "answers": [[ids, round(score, 6), round(total, 5)] for ids, score, total, _ in search.answers],
        }  # fmt: skip


def end_tokens(model: Any, prompt: list[int], params: BeamParams, k: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of one or two end tokens. They are tokens that live beams chose in a search without end tokens."""
    watch = ask(model, prompt, params).watch
    ids = list(dict.fromkeys(token for step in watch.chosen[1:] for token in step))
    order = np.random.default_rng(k).permutation(len(ids))
    for i in range(MAX_TRIES):
        yield tuple(sorted({ids[order[(i + j * (i // len(ids) + 1)) % len(ids)]] for j in range(1 + k % 2)}))


def record_tables() -> Iterator[dict[str, Any]]:
    """Yield searches on tables. The model only runs the search: its log-probabilities are replaced."""
    config = transformers.GPT2Config(vocab_size=TABLE_VOCAB, n_embd=8, n_layer=1, n_head=1, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval()
    ended = forked = 0
    closest = float("inf")
    for seed in range(NUM_TABLES):
        width = (2, 3, 4, 10)[seed % 4]
        params = BeamParams(
            width=width, num_return_sequences=1 if seed % 6 == 5 else width,
            length_penalty=(0.0, 0.6, 1.0, 2.0, -0.5)[seed % 5], early_stopping=(False, True, "never")[seed % 3],
            max_new_tokens=(20, 7, 14, 1, 10, 4)[seed // 8 % 6],
            end_token_ids=TABLE_ENDS[: (1, 2, 3, 0)[seed // 4 % 4]],
        )  # fmt: skip
        search = ask(model, list(TABLE_PROMPT), params, Table(seed))
        watch = search.watch
        if not watch.margin:
            print(f"table {seed}: a tie, left out")
            continue
        ended += bool(watch.end_lengths)
        forked += watch.forks > 1
        closest = min(closest, watch.margin)
        yield {"seed": seed, "params": dataclasses.astuple(params), "answers": search.answers}
    print(f"tables: in {ended} hypotheses ended early, in {forked} beams forked again, closest decision {closest:.1e}")
    if min(ended, forked) < NUM_TABLES // 2:
        raise SystemExit("fewer than half of the searches have early ends, or forks after the first step")


def ask(model: Any, prompt: list[int], params: BeamParams, *processors: transformers.LogitsProcessor) -> Search:
    watch = Watch(model, params)
    ids = torch.tensor([prompt])
    config = transformers.GenerationConfig(
        max_new_tokens=params.max_new_tokens, do_sample=False, num_beams=params.width, pad_token_id=0,
        num_return_sequences=params.num_return_sequences, length_penalty=params.length_penalty,
        early_stopping=params.early_stopping, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config,
            eos_token_id=list(params.end_token_ids) or None,
            logits_processor=transformers.LogitsProcessorList(processors),
        )  # fmt: skip
    watch.finish()
    answers = []
    for row, sequence in enumerate(out.sequences[:, len(prompt) :].tolist()):
        beams = [beam for beam in out.beam_indices[row].tolist() if beam >= 0]  # -1 after the end
        tokens = sequence[: len(beams)]
        logprobs = [float(out.scores[i][at]) for i, at in enumerate(zip(beams, tokens, strict=True))]
        score = float(str(out.sequences_scores[row].numpy()))  # the shortest decimal with the same float32 value
        answers.append([tokens, score, round(sum(logprobs), 5), beams])
    return Search(params, answers, watch)


def joined(cases: list[dict[str, Any]]) -> str:
    """Return JSON with one line per case."""
    return ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)


if __name__ == "__main__":
    main()
