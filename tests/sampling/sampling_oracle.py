"""The sampling oracle: the effect of every sampling parameter on one row of logits, in float64, from the definitions.

It was written from the documents named here, never from this project's sampler. "vLLM" is its version 1 sampler as of
September 2026: vllm/model_executor/layers/utils.py, vllm/sampling_params.py, and in vllm/v1/sample sampler.py,
logits_processor/builtin.py and ops/{penalties,bad_words,topk_topp_sampler}.py. The steps are in vLLM's order. x are the
logits.

 1. raw_logits are x, raw_logprobs are log softmax(x), before all other steps.
 2. Masks set x to -inf: ids that the tokenizer does not have (this project's own step), ids that a grammar forbids, and
    all ids outside allowed_token_ids. The last token of a bad word is masked if the tokens before it are the last ones
    of the output. The prompt does not count.
 3. min_tokens: stop ids are set to -inf while the output has fewer than min_tokens tokens.
 4. logit_bias: x + bias (OpenAI: added to the logits prior to sampling). It does not unmask ids at -inf.
 5. Custom processors, in their order: at the step where vLLM applies those that can move the argmax.
 6. repetition_penalty r, for tokens in the prompt or the output: x / r if x > 0, else x * r. CTRL (Keskar 2019, 4.1)
    only divides. Transformers and vLLM multiply negative values.
 7. frequency_penalty f and presence_penalty p: x - f * c - p * [c > 0], where c counts the token in the output (OpenAI,
    parameter details). The prompt does not count.
 8. If temperature < 1e-5: the most likely token. processed_logits are x at this step, and later steps do not apply.
 9. temperature t: x / t.
10. top_n_sigma n (Tang 2024): drops x below max(x) - n * s. s is the standard deviation of all x that are not -inf.
    min_p m: drops tokens that are less likely than m times the most likely one (Nguyen 2024).
11. top_k: drops tokens below the k-th largest x. All tokens equal to it stay. 0 and -1 keep all.
12. top_p (nucleus sampling, Holtzman 2019): the remaining probabilities are normalised. The smallest set of most likely
    tokens with mass p stays, and all tokens that are equal to the least likely of them.
13. typical_p (Meister 2022): last, as in Transformers; vLLM has none. The remaining probabilities are normalised.
    Tokens are ordered by the distance of -log(probability) from the entropy. The smallest set of nearest tokens with
    mass typical_p stays, and all tokens that are as near as the farthest of them.
14. processed_logits are x / t, with -inf for dropped tokens. processed_logprobs are their log softmax, the distribution
    of the draws.

vLLM is not consistent on ties. PyTorch's top_k keeps all tokens equal to the k-th, its Triton kernel exactly k (vllm
pull request 50979). Which of several equal tokens top_p keeps depends on the sort. The oracle keeps all of them.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

GREEDY_BELOW = 1e-5  # vllm/v1/sample/sampler.py, _SAMPLING_EPS
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
# Largest errors of float32.
MASS_ROUNDING = 1e-6  # in a sum of probabilities
LOGIT_ROUNDING = 4 * 2.0**-24  # in a logit, relative to the largest: four roundings
UNDERFLOW = 1e-30  # probabilities below this count as 0

Processor = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Distribution of the next token. Arrays are [vocab]."""

    raw_logits: np.ndarray        # float64, as given
    scaled_logits: np.ndarray     # float64, after step 9
    processed_logits: np.ndarray  # float64, after step 14
    probs: np.ndarray             # float64, probability of being drawn; 1 for the token of a greedy row
    kept: np.ndarray              # bool, may be drawn
    edge: np.ndarray              # bool, ids at the edge of a filter, where float32 may differ by rounding
    greedy: int                   # the most likely token after step 7; on a tie the lowest id

    def accepts(self, kept: np.ndarray) -> bool:
        """True if float32 may have kept these ids, bool[vocab]."""
        return bool(kept.any()) and not ((kept != self.kept) & ~self.edge).any()

    def probs_of(self, kept: np.ndarray) -> np.ndarray:
        """float64[vocab], the probabilities if these ids are kept, bool[vocab]."""
        return self.probs if (kept == self.kept).all() else softmax(np.where(kept, self.scaled_logits, -np.inf))


def distribution(
    logits: np.ndarray,
    *,
    params: Any,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    bad_word_ids: Sequence[Sequence[int]] = (),
    known_ids: np.ndarray | None = None,
    grammar_ids: np.ndarray | None = None,
    processors: Sequence[Processor] = (),
) -> Oracle:
    """The distribution of the token after prompt and output.

    Args:
        logits: [vocab], of the model.
        params: an object with fields of `jpaged.SamplingParams`. Missing fields are neutral.
        stop_ids: ids that min_tokens forbids: stop_token_ids, and the model's end-of-sequence ids.
        bad_word_ids: bad_words as tokens.
        known_ids, grammar_ids: bool[vocab], ids that the tokenizer has, and that the grammar allows. None = all.
        processors: custom logits processors with bound parameters.

    Raises:
        ValueError: all ids are masked.
    """
    fields = types.SimpleNamespace(**{name: getattr(params, name, value) for name, value in NEUTRAL.items()})
    raw = np.array(logits, np.float64)
    x = _before_temperature(raw, fields, list(prompt_ids), list(output_ids), stop_ids, bad_word_ids,
                            (known_ids, grammar_ids), processors)  # fmt: skip
    nothing = np.zeros(len(x), bool)
    greedy = int(x.argmax())
    rounding = LOGIT_ROUNDING * max(np.abs(values[np.isfinite(values)]).max() for values in (raw, x))
    if fields.temperature < GREEDY_BELOW:
        kept = np.arange(len(x)) == greedy
        near = x >= x[greedy] - rounding
        edge = near if (x[near] < x[greedy]).any() else nothing
        return Oracle(raw, x, x, kept.astype(np.float64), kept, edge, greedy)
    scaled = x / fields.temperature
    rounding /= fields.temperature
    filters = [
        lambda x: _top_n_sigma(x, fields.top_n_sigma, rounding),
        lambda x: _min_p(x, fields.min_p, rounding),
        lambda x: _top_k(x, fields.top_k, rounding),
        lambda x: _top_p(x, fields.top_p, rounding),
        lambda x: _typical_p(x, fields.typical_p, rounding),
    ]
    kept, *others = _outcomes(scaled, filters)
    processed = np.where(kept, scaled, -np.inf)
    probs = softmax(processed)
    edge = np.any([other != kept for other in others], axis=0) if others else nothing
    return Oracle(raw, scaled, processed, probs, kept, edge | (kept & (probs < UNDERFLOW)), greedy)


def logprobs(mode: str, row: Oracle) -> np.ndarray:
    """float64[vocab], the value of each token in a `logprobs_mode`."""
    if mode not in MODES:
        raise ValueError(f"no logprobs_mode {mode!r}: one of {', '.join(MODES)}")
    values = row.raw_logits if mode.startswith("raw") else row.processed_logits
    return log_softmax(values) if mode.endswith("logprobs") else values


def rank(values: np.ndarray, token: int) -> int:
    """Number of tokens that are at least as likely as this one, itself included: vLLM's rank (ops/logprobs.py)."""
    return int((values >= values[token]).sum())


def softmax(x: np.ndarray) -> np.ndarray:
    """float64, 0 for -inf."""
    e = np.exp(x - x.max())
    return e / e.sum()


def log_softmax(x: np.ndarray) -> np.ndarray:
    """float64, -inf for -inf."""
    shifted = x - x.max()
    return shifted - math.log(np.exp(shifted).sum())


# Neutral values of the sampling parameters.
NEUTRAL = types.MappingProxyType({
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None,
    "allowed_token_ids": None, "min_tokens": 0,
})  # fmt: skip


def _before_temperature(
    raw: np.ndarray, fields: types.SimpleNamespace, prompt: list[int], output: list[int], stop_ids: Sequence[int],
    bad_word_ids: Sequence[Sequence[int]], masks: Sequence[np.ndarray | None], processors: Sequence[Processor],
) -> np.ndarray:  # fmt: skip
    """Steps 2 to 7."""
    x = raw.copy()
    for mask in masks:
        if mask is not None:
            x[~np.asarray(mask, bool)] = -np.inf
    if fields.allowed_token_ids:  # in SamplingParams an empty tuple means None; vLLM refuses an empty list
        x[~np.isin(np.arange(len(x)), list(fields.allowed_token_ids))] = -np.inf
    for *before, last in bad_word_ids:
        if output[max(len(output) - len(before), 0) :] == before:
            x[last] = -np.inf
    if len(output) < fields.min_tokens:
        x[list(stop_ids)] = -np.inf
    for token, bias in (fields.logit_bias or {}).items():
        x[int(token)] += bias
    for processor in processors:
        x = np.asarray(processor(x), np.float64)
    count = np.bincount(np.array(output, int), minlength=len(x))
    seen = count > 0
    seen[prompt] = True
    penalty = fields.repetition_penalty
    x = np.where(seen, np.where(x > 0, x / penalty, x * penalty), x)
    x = x - fields.frequency_penalty * count - fields.presence_penalty * (count > 0)
    if not np.isfinite(x.max()):
        raise ValueError("all ids are masked")
    return x


# The filters. x is -inf for tokens that earlier filters dropped. Each returns the kept ids and the edge.

Filter = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # bool[vocab] kept, bool[vocab] edge


def _outcomes(x: np.ndarray, filters: Sequence[Filter]) -> Iterator[np.ndarray]:
    """Ids that all filters keep: first as defined, then with the edge of each filter kept, dropped, or exchanged."""
    if not filters:
        yield x > -np.inf
        return
    kept, edge = filters[0](x)
    ways = [kept]
    if edge.any():
        without = kept & ~edge
        ways += [kept | edge, without if without.any() else edge & ~kept]
    for way in ways:
        if way.any():
            yield from _outcomes(np.where(way, x, -np.inf), filters[1:])


def _all(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x > -np.inf, np.zeros(len(x), bool)


def _top_n_sigma(x: np.ndarray, top_n_sigma: float, rounding: float) -> tuple[np.ndarray, np.ndarray]:
    if top_n_sigma <= 0:
        return _all(x)
    most = x == x.max()
    border = x.max() - top_n_sigma * x[x > -np.inf].std()
    return (x >= border) | most, (np.abs(x - border) <= (1 + top_n_sigma) * rounding) & ~most


def _min_p(x: np.ndarray, min_p: float, rounding: float) -> tuple[np.ndarray, np.ndarray]:
    if min_p <= 0:
        return _all(x)
    most = x == x.max()  # the most likely ids always stay
    border = x.max() + math.log(min_p)
    return (x >= border) | most, (np.abs(x - border) <= rounding) & ~most


def _top_k(x: np.ndarray, top_k: int, rounding: float) -> tuple[np.ndarray, np.ndarray]:
    if not 0 < top_k < (x > -np.inf).sum():
        return _all(x)
    border = np.sort(x)[-top_k]
    kept = x >= border
    near = np.abs(x - border) <= rounding
    # Values equal in float64 are equal in float32. Values that are only near may swap, or become equal.
    return kept, near if (near & ~kept).any() else np.zeros(len(x), bool)


def _top_p(x: np.ndarray, top_p: float, rounding: float) -> tuple[np.ndarray, np.ndarray]:
    return _first_to_have(top_p, x, -x, rounding) if top_p < 1 else _all(x)


def _typical_p(x: np.ndarray, typical_p: float, rounding: float) -> tuple[np.ndarray, np.ndarray]:
    if typical_p >= 1:
        return _all(x)
    surprise = -log_softmax(x)
    probs = softmax(x)
    entropy = float(np.sum(probs[probs > 0] * surprise[probs > 0]))
    return _first_to_have(typical_p, x, np.abs(surprise - entropy), rounding + MASS_ROUNDING * max(1.0, entropy))


def _first_to_have(mass: float, x: np.ndarray, key: np.ndarray, rounding: float) -> tuple[np.ndarray, np.ndarray]:
    """The smallest set of smallest keys with this mass, and all keys that are equal to its largest.

    So an id stays if the ids with strictly smaller keys have less mass. rounding: largest error of a key in float32.
    """
    order = np.argsort(key, kind="stable")
    keys = key[order]
    sums = np.concatenate([[0.0], np.cumsum(softmax(x)[order])])
    below = sums[np.searchsorted(keys, key, side="left")]  # the mass of strictly smaller keys
    equal = sums[np.searchsorted(keys, key, side="right")] - below
    # Bounds of that mass under rounding: near keys may come before, or not.
    least = sums[np.searchsorted(keys, key - 2 * rounding, side="left")]
    most = sums[np.searchsorted(keys, key + 2 * rounding, side="right")] - equal
    finite = x > -np.inf
    edge = (least < mass + MASS_ROUNDING) & (most >= mass - MASS_ROUNDING)
    return finite & (below < mass), finite & edge


# Draws


@dataclasses.dataclass(frozen=True)
class ChiSquare:
    """Pearson's test."""

    statistic: float
    degrees: int
    p_value: float  # probability that draws from this distribution are at least as far off


def chi_square(draws: np.ndarray, probs: np.ndarray) -> ChiSquare:
    """Test draws, ids[n], against probabilities, [vocab].

    Ids are merged into bins, the least likely first, until each bin expects 5 draws. One draw of an id with probability
    0 gives p = 0. p is computed as by Wilson and Hilferty (1931): the cube root of chi-square over its degrees is
    almost normal.
    """
    counts = np.bincount(draws, minlength=len(probs))
    if len(counts) > len(probs) or counts[probs == 0].any():
        return ChiSquare(math.inf, 0, 0.0)
    bins: list[list[float]] = [[0.0, 0.0]]  # expected, observed
    for token in np.argsort(-probs, kind="stable")[::-1]:
        if bins[-1][0] >= 5:
            bins.append([0.0, 0.0])
        bins[-1][0] += probs[token] * len(draws)
        bins[-1][1] += counts[token]
    if len(bins) > 1 and bins[-1][0] < 5:
        expected, observed = bins.pop()
        bins[-1] = [bins[-1][0] + expected, bins[-1][1] + observed]
    degrees = len(bins) - 1
    if degrees == 0:
        return ChiSquare(0.0, 0, 1.0)
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in bins)
    spread = 2 / (9 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return ChiSquare(statistic, degrees, 0.5 * math.erfc(z / math.sqrt(2)))
