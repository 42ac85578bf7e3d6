"""Checks of two engines, or of an engine and itself, that tests of several kinds of parallelism share."""

from tests.support.random_requests import answers, workload


def check_a_batch_and_the_prefix_cache(one, several):
    """Greedy, top_k, top_p, min_p, seeds and log-probabilities; 24 requests on 8 rows; then from the prefix cache."""
    prompts, params = workload(24, seed=1)
    first = answers(one.generate(prompts, params, use_tqdm=False))
    assert answers(several.generate(prompts, params, use_tqdm=False)) == first
    hits = several.stats().prefix_hit_tokens
    assert answers(several.generate(prompts, params, use_tqdm=False)) == first
    assert several.stats().prefix_hit_tokens > hits
    assert several.stats().compiles_after_ready == 0


def check_each_request_alone(engine):
    """A request has the bits that it has in a batch."""
    prompts, params = workload(12, seed=5)
    together = answers(engine.generate(prompts, params, use_tqdm=False))
    each = zip(prompts, params, strict=True)
    alone = [answers(engine.generate(prompt, param, use_tqdm=False))[0] for prompt, param in each]
    assert together == alone
