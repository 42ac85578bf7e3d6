"""A parsed answer: reasoning, content and tool calls, as a whole or as deltas."""

import dataclasses
from collections.abc import Callable, Iterable


@dataclasses.dataclass(slots=True)
class ToolCall:
    """A tool call. `arguments` is a JSON object as text, or its beginning if the call was cut off or is not valid."""

    id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass(slots=True)
class ToolCallDelta:
    """New part of a call. The first delta of a call has its id and name; later ones have more of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclasses.dataclass(slots=True)
class AnswerDelta:
    """New part of an answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


@dataclasses.dataclass(slots=True)
class ParsedAnswer:
    """An answer as a message. Text outside calls and reasoning is content. Fields without text are None."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, deltas: Iterable[AnswerDelta]) -> "ParsedAnswer":
        """Join all deltas of an answer."""
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
    """Text that a parser appends piece by piece: the content, or the reasoning.

    White space after a call or tag is dropped. White space before it is kept only if more text follows it.
    """

    def __init__(self) -> None:
        self._new: list[str] = []
        self._space: list[str] = []  # held-back white space: a call or a tag may follow
        self._at_edge = False  # a call or a tag came after the last text
        self._closed = False   # more text is dropped
        self._has_text = False

    def append(self, text: str) -> None:
        """Append text."""
        if self._closed:
            return
        if self._at_edge:
            text = text.lstrip()
        end = len(text.rstrip())
        if end:
            self._at_edge = False
            self._has_text = True
            self._new += [*self._space, text[:end]]
            self._space = []
        if end < len(text):
            self._space.append(text[end:])

    def mark_edge(self) -> None:
        """Note that a call or a tag is here."""
        self._at_edge = True

    def begin(self) -> None:
        """Note that this channel's text begins here, after a tag. Drops white space before the tag."""
        self._space = []
        self._at_edge = True

    def next_paragraph(self) -> None:
        """Note that another part of the text begins here. It is on a new line if there is text before it."""
        self._space = ["\n"] if self._has_text else []
        self._at_edge = True

    def close(self) -> None:
        """Drop text that is appended later."""
        self._closed = True

    def end(self) -> None:
        """Note that the text ends here."""
        if not self._at_edge:
            self._new += self._space
        self._space = []

    def pop_new(self) -> str:
        """Return the text since the last call."""
        new = "".join(self._new)
        self._new = []
        return new


class AnswerSink:
    """Receives the parts of an answer from a parser.

    new_id:   returns a new id for a call.
    parallel: False keeps the first call and drops the others, as `parallel_tool_calls=False` requires.
    """

    def __init__(self, new_id: Callable[[], str], *, parallel: bool = True):
        self.reasoning = Channel()
        self.content = Channel()
        self.completed = 0  # number of complete calls
        self.is_open = False  # the current call is not complete
        self._new_id = new_id
        self._max_calls = None if parallel else 1
        self._started = 0
        self._ids: set[str] = set()
        self._calls: list[ToolCallDelta] = []
        self._arguments: list[str] = []

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. This ends the text before it. call_id: the model's id; None or a used one: a new id."""
        self.content.mark_edge()
        self._flush()
        self._started += 1
        self.is_open = True
        if not self._dropped:
            own = self._new_id() if call_id is None or call_id in self._ids else call_id
            self._ids.add(own)
            self._calls.append(ToolCallDelta(self._started - 1, own, name))

    def arguments(self, text: str) -> None:
        """Append text to the arguments of the current call."""
        if not self._dropped:
            self._arguments.append(text)

    def end_call(self) -> None:
        """End the current call, which is complete."""
        self.is_open = False
        if not self._dropped:
            self.completed += 1
        self.content.mark_edge()

    def pop_new(self) -> AnswerDelta:
        """Return the delta since the last call."""
        self._flush()
        calls, self._calls = self._calls, []
        return AnswerDelta(self.reasoning.pop_new(), self.content.pop_new(), calls)

    @property
    def _dropped(self) -> bool:
        return self._max_calls is not None and self._started > self._max_calls

    def _flush(self) -> None:
        """Move the arguments to the delta of their call."""
        text = "".join(self._arguments)
        self._arguments = []
        if not text:
            return
        if not self._calls:
            self._calls.append(ToolCallDelta(self._started - 1))
        self._calls[-1].arguments += text
