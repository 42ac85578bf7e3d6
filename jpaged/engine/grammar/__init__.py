"""Structured output: compiles a request's `StructuredOutputsParams` to a grammar that limits the tokens to sample.

1. `GrammarCompiler.submit` checks the parameters against the engine's limits and compiles them in a worker. The
   compile runs first in a child process that can be killed (`probe.py`), then in this process.
2. `Grammar.matcher` returns a new `GrammarMatcher` for each answer.
3. The matcher writes the mask of the next tokens, and accepts each sampled token.
"""

from jpaged.engine.grammar.compiler import Grammar, GrammarCompiler
from jpaged.engine.grammar.limits import GrammarLimits
from jpaged.engine.grammar.matcher import GrammarMatcher
from jpaged.engine.grammar.reasoning_prefix import ReasoningPrefix

__all__ = ["Grammar", "GrammarCompiler", "GrammarLimits", "GrammarMatcher", "ReasoningPrefix"]
