"""Reasoning that may stand before what a grammar says: a model that thinks would otherwise be kept from it."""

import dataclasses
import json
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class ReasoningPrefix:
    """What may come before an answer: any text between two tags, or none at all.

    opened: the prompt has the start tag already, so the answer begins inside.
    """

    start: str
    end: str
    opened: bool

    def prepend_to(self, grammar: str, special_id: Callable[[str], int | None]) -> str:
        """A grammar of llguidance, Lark or JSON text, with this before it. `special_id`: as of `Source.text`."""

        def tag(text: str) -> str:
            token_id = special_id(text)
            return json.dumps(text) if token_id is None else f"<[{token_id}]>"

        known = special_id(self.end) is not None
        thought = f"thought: TEXT {tag(self.end)}" if known else f"thought[lazy]: TEXT {tag(self.end)}"
        begun = f"thought {_BREAKS}" if self.opened else f"({tag(self.start)} thought {_BREAKS})?"
        lines = [f"start: {begun} @answer", thought, r"TEXT: /(.|\n)*/"]
        parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
        parts[0]["name"] = "answer"
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *parts]})


_BREAKS = r"/\n{0,2}/"  # between end tag and answer
