"""Allows reasoning before an answer that a grammar constrains. Without it, the grammar would forbid reasoning."""

import dataclasses
import json

from jpaged.engine.grammar.special_text import SpecialTokens


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningPrefix:
    """Reasoning before the answer: any text between two tags, or none.

    opened: the prompt already has the start tag, so the answer begins inside the reasoning.
    other_starts, other_ends: other texts that the model may write as tags.
    header: text before the answer, after the reasoning.
    """

    start: str
    end: str
    opened: bool
    other_starts: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    header: str = ""

    def prepend_to(self, grammar: str, special: SpecialTokens) -> str:
        """Put reasoning before a grammar (Lark or JSON text). Tags that are special tokens are written as tokens."""
        start, end = (
            _one_of([special.lark(tag) for tag in tags])
            for tags in ((self.start, *self.other_starts), (self.end, *self.other_ends))
        )
        has_special = any(part in special.ids for part in special.split(self.end))
        rule = f"reasoning: TEXT {end}" if has_special else f"reasoning[lazy]: TEXT {end}"
        before = f"reasoning {_BREAKS}" if self.opened else f"({start} reasoning {_BREAKS})?"
        header = f" {special.lark(self.header)}" if self.header else ""
        lines = [f"start: {before}{header} @answer", rule, r"TEXT: /(.|\n)*/"]
        parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
        parts[0]["name"] = "answer"
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *parts]})


def _one_of(alternatives: list[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


_BREAKS = r"/\n{0,2}/"  # between the end tag and the answer
