"""Calls that a type checker accepts, and calls that it refuses. mypy reads this file in the gate; nothing runs it.

A line with an ignore comment must be an error: mypy reports a comment that ignores nothing.
"""

from jpaged import LLM, AsyncLLM, BeamSearchParams, SamplingParams, TextPrompt, TokensPrompt, generate


def accepted() -> None:
    """Options of the right name and type."""
    LLM("demo", speculative_config={"method": "ngram"}, spec_tokens=3)
    llm = LLM("demo", max_model_len=4096, dtype="half", row_buckets=[8, 16], tensor_parallel_size=1)
    prompt: TokensPrompt = {"prompt_token_ids": [1, 2], "cache_salt": "a"}
    llm.generate(prompt, SamplingParams(temperature=0.5, stop=["a"], logit_bias={3: 1.0}))
    expected: TextPrompt = {"prompt": "a", "prediction": "b"}
    llm.generate(expected)
    llm.beam_search("a", BeamSearchParams(beam_width=4, max_tokens=8))
    generate("demo", ["a"], max_num_seqs=8)


def refused() -> None:
    """One mistake a line."""
    LLM("demo", max_model_length=4096)  # type: ignore[call-arg]
    LLM("demo", max_model_len="4096")  # type: ignore[arg-type]
    LLM("demo", spec_tokens="3")  # type: ignore[arg-type]
    AsyncLLM("demo", max_num_seq=8)  # type: ignore[call-arg]
    generate("demo", "a", max_num_seq=8)  # type: ignore[call-arg]
    SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    SamplingParams(temperature="cold")  # type: ignore[arg-type]
    BeamSearchParams(beam_width=4, max_token=8)  # type: ignore[call-arg]
