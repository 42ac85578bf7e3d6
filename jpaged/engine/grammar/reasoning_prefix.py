"""Allows reasoning before an answer that a grammar constrains. Without it, the grammar would forbid reasoning."""

import dataclasses
import json
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningPrefix:
    """Reasoning before the answer: any text between two tags, or none.

    opened: the prompt already has the start tag, so the answer begins inside the reasoning.
    """

    start: str
    end: str
    opened: bool

    def prepend_to(self, grammar: str, special_id: Callable[[str], int | None]) -> str:
        """Return a grammar of llguidance (Lark or JSON text) with the reasoning before it.

        special_id: see `Source.text`.
        """

        def tag(text: str) -> str:
            token_id = special_id(text)
            return json.dumps(text) if token_id is None else f"<[{token_id}]>"

        end_is_token = special_id(self.end) is not None
        rule = f"reasoning: TEXT {tag(self.end)}" if end_is_token else f"reasoning[lazy]: TEXT {tag(self.end)}"
        before = f"reasoning {_BREAKS}" if self.opened else f"({tag(self.start)} reasoning {_BREAKS})?"
        lines = [f"start: {before} @answer", rule, r"TEXT: /(.|\n)*/"]
        parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
        parts[0]["name"] = "answer"
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *parts]})


_BREAKS = r"/\n{0,2}/"  # between the end tag and the answer
