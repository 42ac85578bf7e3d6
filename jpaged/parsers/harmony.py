"""Parses answers of gpt-oss, in OpenAI's Harmony format: messages with a header each, in three channels.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>
    <|channel|>commentary to=functions.find <|constrain|>json<|message|>{"text": "a"}<|call|>

analysis is reasoning, final is content, and so is commentary without a recipient. A recipient is a tool that is called.
The prompt ends with `<|start|>assistant`. The tags are special tokens of the checkpoint's own tokenizer.
Source: OpenAI's description of the format (openai/harmony, docs/format.md).
"""

import re

from jpaged.parsers.answer import AnswerSink
from jpaged.parsers.json_calls import Known, discard, drop_brace, emit_call
from jpaged.parsers.json_text import read_value
from jpaged.parsers.scanner import CALL_STEPS, Scanner, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
# Beginnings of a header: a tag, a recipient, or what models write without <|start|>. Other text is content.
OPENINGS = (START, CHANNEL, MESSAGE, " to=", "to=", "assistant" + CHANNEL, "assistant to=", "commentary" + CHANNEL)

_CHANNEL = re.compile(r"<\|channel\|>\s*+(\w++)")
_RECIPIENT = re.compile(r"\bto=([\w.\-]++)")


def read(scanner: Scanner, sink: AnswerSink, known: Known) -> Steps[None]:
    """Parse an answer to its end."""
    while scanner.step(CALL_STEPS) and (yield from scanner.peek()):
        scanner.hold()
        opening = ""
        for text in OPENINGS:
            opening = opening or (text if (yield from scanner.accept(text)) else "")
        if not opening:
            scanner.release()
            tag = yield from scanner.until(MARKERS, sink.content.append)
            if tag in (START, CHANNEL, MESSAGE):
                scanner.back(tag)
            continue
        header = [opening]
        tag = opening if opening == MESSAGE else (yield from scanner.until((MESSAGE, *ENDS), header.append))
        if tag == MESSAGE:
            yield from _read_message(scanner, sink, known, "".join(header))
        else:
            sink.content.append(scanner.release())


def _read_message(scanner: Scanner, sink: AnswerSink, known: Known, header: str) -> Steps[None]:
    """Consume a message after its header, which the scanner holds."""
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    is_reasoning = channel is not None and channel[1] == "analysis"
    name = recipient[1].removeprefix("functions.") if recipient else ""
    text = sink.content
    if name and known(name):
        following = yield from scanner.space()
        if following == "{":
            sink.start_call(name)
            scanner.release()  # the call has begun, so its text cannot become content
            if (yield from read_value(scanner, sink.arguments)):
                sink.end_call()
                yield from drop_brace(scanner, sink)
        elif not following:  # cut off before its arguments
            scanner.release()
        elif (yield from scanner.accept(ENDS[1])):
            scanner.release()
            emit_call(sink, name, "{}")
            return
        else:
            text.append(scanner.release())
    elif is_reasoning or not name:
        text = sink.reasoning if is_reasoning else sink.content
        scanner.release()
        text.next_paragraph()
    else:  # a tool that the request does not have: text in its arguments is no message
        if (yield from scanner.space()) == "{":
            yield from read_value(scanner, discard)
        text.append(scanner.release())
    tag = yield from scanner.until((*ENDS, START, CHANNEL), text.append)
    text.mark_edge()
    if tag in (START, CHANNEL):  # the end tag is missing
        scanner.back(tag)
