"""Structured output: what a request asks for becomes a grammar, and the grammar says which tokens may come next.

1. `GrammarCompiler.submit` checks a request's `StructuredOutputsParams` against the engine's limits, and compiles them
   in a worker: first in a child process that can be killed (`probe.py`), then here.
2. `Grammar.matcher` gives each answer its own `GrammarMatcher`.
3. A matcher fills the bits of the tokens that may come next, and takes the token that was sampled.
"""

from jpaged.engine.grammar.compiler import Grammar, GrammarCompiler
from jpaged.engine.grammar.limits import GrammarLimits
from jpaged.engine.grammar.matcher import GrammarMatcher
from jpaged.engine.grammar.reasoning_prefix import ReasoningPrefix

__all__ = ["Grammar", "GrammarCompiler", "GrammarLimits", "GrammarMatcher", "ReasoningPrefix"]
