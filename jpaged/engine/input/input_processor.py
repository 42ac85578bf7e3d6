"""Makes a request group from a prompt and its parameters. Refuses bad input before it is scheduled.

Called by: `LLM` in the caller's thread, `AsyncLLM` in threads for tokenising, `Engine.add_request`.
Owns: the tokenizer's encoder, and the compiler of grammars.
Never: schedules a request, or remembers one.

Any thread may call it. Requests change only the flags of messages that are logged once.
"""

import dataclasses
import logging
import time
from concurrent.futures import Future
from typing import Any, cast

import numpy as np

from jpaged.engine.adapters.loaded_adapter import LoadedAdapter
from jpaged.engine.engine_options import EngineOptions
from jpaged.engine.grammar import Grammar, GrammarCompiler, ReasoningPrefix
from jpaged.engine.input.model_limits import ModelLimits
from jpaged.engine.input.prompt_reader import Cancelled, Prompt, PromptReader
from jpaged.engine.output.reasoning_budget import EncodedReasoningTags, ReasoningBudget
from jpaged.engine.output.stop_strings import stop_automaton
from jpaged.engine.request import Request
from jpaged.engine.request_group import RequestGroup
from jpaged.engine.sampling_extras import SamplingExtras
from jpaged.engine.strategies import BeamStrategy, BestOfStrategy, PoolStrategy, SampleStrategy, ScoreStrategy, Strategy
from jpaged.engine.strategies.beam_search import BeamSearch
from jpaged.engine.strategies.pooled_outputs import check_task
from jpaged.errors import RequestError
from jpaged.outputs import RequestMetrics
from jpaged.params.pooling import PoolingParams
from jpaged.params.reasoning_tags import ReasoningTags
from jpaged.params.sampling import RequestOutputKind, SamplingParams
from jpaged.params.scoring import ScoringParams
from jpaged.requester import ANYONE, Requester

__all__ = ["InputProcessor", "ModelLimits", "Prompt"]

logger = logging.getLogger(__name__)

MAX_PROMPT_LOGPROBS = 2**20  # of one request: about 100 MB of Python objects
MAX_PRIORITY = 2**31 - 1
POOLED = SamplingParams(temperature=0, max_tokens=1, detokenize=False)  # sampling parameters of pooled requests
_DEFAULTS = SamplingParams()


class InputProcessor:
    """Makes request groups."""

    def __init__(self, limits: ModelLimits, tokenizer: Any = None, compiler: GrammarCompiler | None = None):
        """Without a transformers tokenizer, prompts must be ids. Without a compiler, structured outputs are refused."""
        self.limits = limits
        self._prompts = PromptReader(limits, tokenizer)
        self._compiler = compiler
        self._tokenizer = tokenizer
        self._logged_unused = False  # logged a beam search with sampling parameters
        self._logged_cut = False  # logged a max_tokens beyond max_model_len
        self._eos_token_ids = limits.end_token_ids

    @classmethod
    def create(cls, limits: ModelLimits, tokenizer: Any, options: EngineOptions) -> "InputProcessor":
        """Make an input processor, with a grammar compiler if the model generates text."""
        compiler = None
        if tokenizer is not None and options.pooling is None:
            compiler = GrammarCompiler(tokenizer, limits.vocab_size, options.eos_token_ids, options.grammar_limits)
        return cls(limits, tokenizer, compiler)

    def prepare_grammars(self) -> None:
        """Read the tokenizer for grammars now. Otherwise the first request with a grammar makes all streams wait."""
        if self._compiler is not None:
            try:
                self._compiler.warm_up().result()
            except Exception as error:  # requests for a grammar are then refused
                logger.warning("no structured output with this tokenizer: %s", error)

    def close(self) -> None:
        """Stop the grammar compiler."""
        if self._compiler is not None:
            self._compiler.close()

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | ScoringParams,
        *,
        stream: bool = False,
        priority: int = 0,
        refuse_cut: bool = False,
        cancelled: Cancelled = lambda: False,
        requester: Requester = ANYONE,
        adapter: Future[LoadedAdapter] | None = None,
    ) -> RequestGroup:
        """Check a prompt and its parameters, and make a request group. Raises RequestError.

        stream:     emit every new token, if the parameters allow it.
        refuse_cut: raise RequestError if prompt and max_tokens exceed max_model_len, instead of a warning.
        cancelled:  called while a long text is tokenised. If it returns True, TokenisingCancelled is raised.
        requester:  client for which a grammar is compiled.
        adapter:    LoRA adapter, from `AdapterRegistry.get`; None: the base model alone.
        """
        metrics = RequestMetrics(arrival_time=time.monotonic())
        check_task(self.limits.pooling, params)
        pooling_params = params if isinstance(params, PoolingParams) else None
        scoring = params if isinstance(params, ScoringParams) else None
        processed = self.limits.processed_logprobs and scoring is not None and scoring.sampling_params is not None
        if isinstance(params, PoolingParams):
            params = _pooled(params)
        elif isinstance(params, ScoringParams):
            params = params.request_params(processed=processed)
        self._check_params(params)
        params = self._with_sampling_mask(_counted(params, self.limits.vocab_size))
        params = self._with_routed_experts(params)
        self._check_priority(priority)
        checked = self._prompts.read(prompt, params, cancelled)
        token_ids = checked.token_ids
        self._check_prompt_logprobs(params, len(token_ids))
        per_token = pooling_params is not None and pooling_params.per_token
        max_total_tokens = self.limits.max_model_len
        if pooling_params is not None or scoring is not None:
            max_total_tokens = len(token_ids) + 1  # a pooled prompt may fill the model: no token is sampled
        elif params.max_tokens is not None:
            self._check_max_tokens(params.max_tokens, len(token_ids), refuse=refuse_cut)
            max_total_tokens = min(max_total_tokens, len(token_ids) + params.max_tokens)
        end_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        extras = self._extras(params, end_token_ids)
        if scoring is not None:
            _check_scoring(scoring, len(token_ids))
        requests = [
            Request(
                request_id=request_id,
                prompt_token_ids=token_ids,
                params=params,
                max_total_tokens=max_total_tokens,
                eos_token_ids=end_token_ids,
                eos_token_id=self.limits.eos_token_id,
                metrics=metrics,
                index=index,
                priority=int(priority),
                is_beam=params.use_beam_search,
                pools_tokens=per_token,
                score_from=None if scoring is None else scoring.num_prompt_tokens,
                scores_processed=processed,
                extras=extras,
                prediction_token_ids=checked.prediction,
            )
            for index in range(params.num_sequences)
        ]
        strategy: Strategy = ScoreStrategy()
        if scoring is None:
            strategy = self._strategy(params, pooling_params, max_total_tokens - len(token_ids), end_token_ids)
        grammar = self._add_reasoning_and_grammar(requests, requester)  # last: no grammar for a refused request
        streams = stream and not params.chooses and params.output_kind is not RequestOutputKind.FINAL_ONLY
        return RequestGroup(
            request_id=request_id,
            prompt=checked.text,
            prompt_token_ids=token_ids,
            params=params,
            requests=requests,
            strategy=strategy,
            metrics=metrics,
            streams=streams and pooling_params is None and scoring is None,
            cache_salt=checked.cache_salt,
            grammar=grammar,
            adapter=adapter,
        )

    def _strategy(
        self,
        params: SamplingParams,
        pooling_params: PoolingParams | None,
        max_new_tokens: int,
        end_token_ids: frozenset[int],
    ) -> Strategy:
        """Choose the strategy, which knows the kind of answer. The scheduler only asks it for what differs."""
        if pooling_params is not None and self.limits.pooling is not None:
            return PoolStrategy(self.limits.pooling, pooling_params)
        if params.use_beam_search:
            search = self._search(params, max_new_tokens, end_token_ids)
            return BeamStrategy(search, keep_candidates=params.logprobs is not None)
        return BestOfStrategy() if params.chooses else SampleStrategy()

    def _add_reasoning_and_grammar(self, requests: list[Request], requester: Requester) -> Future[Grammar] | None:
        """Give each request its reasoning budget, and start to compile their grammar."""
        params, prompt = requests[0].params, requests[0].prompt_token_ids[: requests[0].score_from]
        tags = cast(ReasoningTags | None, params.reasoning_tags)
        opened = tags is not None and self._has_opened(tags, prompt, params)
        ended = tags is not None and tags.opened is False
        if (budget := params.thinking_token_budget) is not None:
            for request in requests:
                limit = self._reasoning_budget(tags, budget, opened=opened)
                request.output.reasoning_budget = None if ended else limit
        if params.structured_outputs is None:
            return None
        reasoning = None
        if tags is not None and not ended:
            reasoning = ReasoningPrefix(
                tags.start, tags.end, opened, tags.other_starts, tags.other_ends, tags.header
            )
        return self._grammar(params, reasoning, requester)

    def _with_sampling_mask(self, params: SamplingParams) -> SamplingParams:
        """Decide a `return_sampling_mask` of None. Raises RequestError for a True that cannot be answered."""
        asked, returns = params.return_sampling_mask, self.limits.returns_sampling_mask
        if asked is None:
            if returns and params.drops_ids and not params.greedy and not params.use_beam_search:
                return dataclasses.replace(params, return_sampling_mask=True)
            return params
        if asked:
            reason = (
                "needs an engine with the option return_sampling_mask=True" if not returns
                else "needs random sampling: a temperature above 0, and no beam search"
                if params.greedy or params.use_beam_search
                else "has no use, because no id is dropped: set top_k, top_p or min_p, or leave it out"
                if not params.drops_ids else None
            )  # fmt: skip
            if reason is not None:
                raise RequestError("return_sampling_mask", asked, reason)
        return params

    def _with_routed_experts(self, params: SamplingParams) -> SamplingParams:
        """Decide a `return_routed_experts` of None. Raises RequestError for a True that cannot be answered."""
        asked, returns = params.return_routed_experts, self.limits.returns_routed_experts
        if asked is None and returns and not params.use_beam_search:
            return dataclasses.replace(params, return_routed_experts=True)
        if asked and not returns:
            accepted = "needs an engine with the option enable_return_routed_experts=True"
            raise RequestError("return_routed_experts", asked, accepted)
        if asked and params.use_beam_search:
            raise RequestError("return_routed_experts", asked, "does not work with use_beam_search: leave it out")
        return params

    def _check_max_tokens(self, max_tokens: int, prompt_len: int, *, refuse: bool) -> None:
        """Refuse, or log once, a max_tokens that the model cannot reach after the prompt."""
        max_model_len = self.limits.max_model_len
        room = max_model_len - prompt_len
        if max_tokens <= room:
            return
        reason = (
            f"is more than fits: max_model_len={max_model_len:,} leaves {room:,} tokens after a prompt of "
            f"{prompt_len:,} tokens"
        )
        if refuse:
            raise RequestError("max_tokens", max_tokens, f"{reason}; ask for at most {room:,}, or leave it out")
        if not self._logged_cut and max_tokens != _DEFAULTS.max_tokens:
            self._logged_cut = True
            logger.warning("max_tokens=%d %s; answers end there with finish_reason 'length' (logged once)",
                           max_tokens, reason)  # fmt: skip

    def _check_prompt_logprobs(self, params: SamplingParams, prompt_len: int) -> None:
        asked = params.prompt_logprobs
        if asked is not None and (asked + 1) * prompt_len > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                "prompt_logprobs", asked, f"gives, with a prompt of {prompt_len:,} tokens, more than "
                f"{MAX_PROMPT_LOGPROBS:,} log-probabilities: ask for {MAX_PROMPT_LOGPROBS // prompt_len - 1} or fewer",
            )  # fmt: skip

    def _grammar(
        self, params: SamplingParams, reasoning: ReasoningPrefix | None, requester: Requester
    ) -> Future[Grammar]:
        if self._tokenizer is None or self._compiler is None:
            accepted = "the model has no tokenizer: start with the option tokenizer"
            raise RequestError("structured_outputs", params.structured_outputs, accepted)
        return self._compiler.submit(cast(Any, params.structured_outputs), reasoning, requester)

    def _has_opened(self, tags: ReasoningTags, token_ids: list[int], params: SamplingParams) -> bool:
        """Whether the prompt ends inside reasoning, which the answer then continues."""
        if params.structured_outputs is None and params.thinking_token_budget is None:
            return False
        if self._tokenizer is None:
            accepted = "are strings, and the model has no tokenizer: start with the option tokenizer"
            raise RequestError("reasoning_tags", (tags.start, tags.end), accepted)
        return tags.opened_after(self._tokenizer, token_ids)

    def _reasoning_budget(self, tags: ReasoningTags | None, budget: int, *, opened: bool) -> ReasoningBudget:
        if tags is None:
            accepted = (
                "needs reasoning tags: set reasoning_tags as well, or pass reasoning_parser to LLM.chat, or start the "
                "server with it"
            )
            raise RequestError("thinking_token_budget", budget, accepted)
        end_ids = tuple(self._tokenizer.encode(tags.end, add_special_tokens=False))
        if not end_ids or max(end_ids) >= self.limits.vocab_size:
            raise RequestError("reasoning_tags", tags.end, "the model has no tokens for this tag")
        encoded = EncodedReasoningTags(
            tags.start.encode(), tags.end.encode(), end_ids, tuple(map(str.encode, tags.other_starts)),
            tuple(map(str.encode, (*tags.other_ends, *tags.stops))),
        )  # fmt: skip
        return ReasoningBudget(encoded, budget, opened=opened)

    def _extras(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> SamplingExtras | None:
        """Sampling state that has no column in the request table. Raises RequestError if no token could be sampled."""
        if not params.needs_extras:
            return None
        extras = SamplingExtras(
            params,
            self.limits.vocab_size,
            end_token_ids=eos_token_ids | set(params.stop_token_ids or ()),
            bad_words=[ids for word in params.bad_words or () for ids in self._bad_word(word)],
            processors=self.limits.processors,
        )
        if not extras.is_needed:
            return None
        if not extras.allows_some(self.limits.known_ids):
            name = "min_tokens" if params.min_tokens else "bad_words" if params.bad_words else "allowed_token_ids"
            raise RequestError(name, getattr(params, name), "leaves no token to sample")
        return extras

    def _bad_word(self, word: str) -> list[list[int]]:
        """The ids of a bad word, and its ids after a blank. (vLLM forbids the latter only if both have equal lengths.)

        A bad word of white space, such as a line break, has its own ids only.
        """
        if self._tokenizer is None:
            raise RequestError("bad_words", word, "the model has no tokenizer: use logit_bias")
        texts = (word.lstrip(), " " + word.lstrip()) if word.strip() else (word,)
        sequences = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [ids for ids in sequences if ids]

    def _search(self, params: SamplingParams, max_new_tokens: int, eos_token_ids: frozenset[int]) -> BeamSearch:
        """The beam search of a request. Raises RequestError if the device returns too few candidates for it."""
        limits = self.limits
        search = BeamSearch(
            width=params.num_sequences,
            max_new_tokens=max_new_tokens,
            end_token_ids=eos_token_ids | set(params.stop_token_ids or ()),
            length_penalty=params.length_penalty,
            early_stopping=cast(Any, params.early_stopping),
        )
        needed = min(search.num_candidates, limits.vocab_size)
        if needed > limits.max_logprobs:
            raise RequestError(
                "beam_width",
                params.num_sequences,
                f"needs the {needed} most likely tokens of each beam (the width, and one for each end token), the "
                f"engine returns {limits.max_logprobs}: use fewer beams, or start with max_logprobs={needed}",
            )
        unused = [name for name in ("top_p", "top_k", "min_p") if getattr(params, name) != getattr(_DEFAULTS, name)]
        if unused and not self._logged_unused:
            self._logged_unused = True
            logger.info("%s: not used in a beam search (logged once)", ", ".join(unused))
        return search

    def _check_priority(self, priority: int) -> None:
        if isinstance(priority, bool) or not isinstance(priority, (int, np.integer)) or abs(priority) > MAX_PRIORITY:
            raise RequestError("priority", priority, f"must be an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        if priority and not self.limits.priorities:
            raise RequestError("priority", priority, "is not used by this engine: start the engine with the option "
                               "scheduling_policy='priority', or leave it out")  # fmt: skip

    def _check_params(self, params: SamplingParams) -> None:
        limits = self.limits
        if not isinstance(params, SamplingParams):
            raise RequestError("sampling_params", params, "must be a jpaged.SamplingParams")
        if len(params.logprob_token_ids or ()) > limits.max_logprobs:
            accepted = f"at most {limits.max_logprobs}, which the option max_logprobs sets"
            raise RequestError("logprob_token_ids", f"{len(params.logprob_token_ids or ())} ids", accepted)
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name) or 0
            if (limits.vocab_size if asked < 0 else asked) > limits.max_logprobs:
                accepted = f"must be at most {limits.max_logprobs}, which the option max_logprobs sets"
                raise RequestError(name, getattr(params, name), accepted)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            for token_id in getattr(params, name) or ():
                if token_id >= limits.vocab_size:
                    raise RequestError(name, token_id, f"token ids are 0 to {limits.vocab_size - 1}")
        if params.stop:
            if self._tokenizer is None:
                raise RequestError("stop", params.stop, "is searched in the text, and the model has no tokenizer: "
                                   "leave it out, use stop_token_ids, or start with the option tokenizer")  # fmt: skip
            stop_automaton(tuple(params.stop))  # cached, and built here because no step waits for it


def _counted(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Replace -1 in logprobs and prompt_logprobs by the vocabulary size."""
    names = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1]
    return dataclasses.replace(params, **dict.fromkeys(names, vocab_size)) if names else params


def _check_scoring(scoring: ScoringParams, num_tokens: int) -> None:
    """Refuse a text without the tokens before the scored ones."""
    count = scoring.num_prompt_tokens
    if count > num_tokens:
        raise RequestError("num_prompt_tokens", count, f"must be at most {num_tokens}, the tokens of the text")


def _pooled(params: PoolingParams) -> SamplingParams:
    """Sampling parameters of a pooled request."""
    if params.truncate_prompt_tokens is None:
        return POOLED
    return dataclasses.replace(
        POOLED, truncate_prompt_tokens=params.truncate_prompt_tokens, truncation_side=params.truncation_side
    )
