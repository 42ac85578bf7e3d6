"""Allows reasoning before an answer that a grammar constrains. Without it, the grammar would forbid reasoning."""

import dataclasses
import json

from jpaged.engine.grammar.special_text import SpecialTokens


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningPrefix:
    """Reasoning before the answer: any text between two tags, or none.

    opened: the prompt already has the start tag, so the answer begins inside the reasoning.
    """

    start: str
    end: str
    opened: bool

    def prepend_to(self, grammar: str, special: SpecialTokens) -> str:
        """Put reasoning before a grammar (Lark or JSON text). Tags that are special tokens are written as tokens."""
        start, end = (special.lark(tag) if tag in special.ids else json.dumps(tag) for tag in (self.start, self.end))
        rule = f"reasoning: TEXT {end}" if self.end in special.ids else f"reasoning[lazy]: TEXT {end}"
        before = f"reasoning {_BREAKS}" if self.opened else f"({start} reasoning {_BREAKS})?"
        lines = [f"start: {before} @answer", rule, r"TEXT: /(.|\n)*/"]
        parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
        parts[0]["name"] = "answer"
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *parts]})


_BREAKS = r"/\n{0,2}/"  # between the end tag and the answer
