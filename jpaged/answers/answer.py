"""What was read of an answer: its reasoning, its content and its tool calls, whole or as what is new."""

import dataclasses
from collections.abc import Callable, Iterable


@dataclasses.dataclass(slots=True)
class ToolCall:
    """A call of a tool. `arguments` is a JSON object as text; of a call that was cut off or broke, its beginning."""

    id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass(slots=True)
class ToolCallDelta:
    """What is new in a call: the first one brings its id and name, the others further text of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclasses.dataclass(slots=True)
class AnswerDelta:
    """What is new in an answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


@dataclasses.dataclass(slots=True)
class ParsedAnswer:
    """An answer as a message: text outside of calls and reasoning is content; None stands for what it does not have."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, deltas: Iterable[AnswerDelta]) -> "ParsedAnswer":
        """All deltas of an answer together."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        arguments: list[list[str]] = []
        for delta in deltas:
            content.append(delta.content)
            reasoning.append(delta.reasoning)
            for new in delta.tool_calls:
                if new.id is not None and new.name is not None:
                    calls.append(ToolCall(new.id, new.name))
                    arguments.append([])
                arguments[new.index].append(new.arguments)
        for call, pieces in zip(calls, arguments, strict=True):
            call.arguments = "".join(pieces)
        return cls("".join(content) or None, "".join(reasoning) or None, calls)


class Channel:
    """Text that a parser gives piece by piece.

    White space before a call or tag stays away unless text comes behind that, white space behind it always does.
    """

    def __init__(self) -> None:
        self._new: list[str] = []
        self._space: list[str] = []  # held back: a call or a tag may follow
        self._at_edge = False        # a call or a tag came after the last text

    def give(self, text: str) -> None:
        """More text."""
        if self._at_edge:
            text = text.lstrip()
        end = len(text.rstrip())
        if end:
            self._at_edge = False
            self._new += [*self._space, text[:end]]
            self._space = []
        if end < len(text):
            self._space.append(text[end:])

    def edge(self) -> None:
        """Here is a call or a tag."""
        self._at_edge = True

    def begin(self) -> None:
        """Here is a call or a tag, and text begins after it: white space before it is nothing's."""
        self._space = []
        self._at_edge = True

    def end(self) -> None:
        """No more text will come."""
        if not self._at_edge:
            self._new += self._space
        self._space = []

    def take(self) -> str:
        """What is new since the last time."""
        new = "".join(self._new)
        self._new = []
        return new


class AnswerSink:
    """What parsers write into.

    new_id:   makes the id of a call.
    parallel: False keeps the first call of an answer and drops the others, as `parallel_tool_calls` promises.
    """

    def __init__(self, new_id: Callable[[], str], *, parallel: bool = True):
        self.reasoning = Channel()
        self.content = Channel()
        self.completed = 0  # calls
        self._new_id = new_id
        self._most = None if parallel else 1
        self._started = 0
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []

    def start_call(self, name: str) -> None:
        """A call begins; text before it is whole."""
        self.content.edge()
        self._flush()
        self._started += 1
        if not self._dropped:
            self._calls.append(ToolCallDelta(self._started - 1, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if not self._dropped:
            self._arguments.append(text)

    def end_call(self) -> None:
        """The call that began last is whole."""
        if not self._dropped:
            self.completed += 1
        self.content.edge()

    def take(self) -> AnswerDelta:
        """What is new since the last time."""
        self._flush()
        calls, self._calls = self._calls, []
        return AnswerDelta(self.reasoning.take(), self.content.take(), calls)

    @property
    def _dropped(self) -> bool:
        return self._most is not None and self._started > self._most

    def _flush(self) -> None:
        """Put the arguments that came into the delta of their call."""
        text = "".join(self._arguments)
        self._arguments = []
        if not text:
            return
        if not self._calls:
            self._calls.append(ToolCallDelta(self._started - 1))
        self._calls[-1].arguments += text
