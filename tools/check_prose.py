"""Check that the repository's prose is plain English: no riddles, and no docstring sentence over 30 words.

    python tools/check_prose.py                      # every tracked *.py, README.md and docs/*.md
    python tools/check_prose.py jpaged/engine README.md

Phrases of RULES are searched in docstrings, comments, Markdown, and the product's messages of four words and more. In
docstrings words of a sentence are counted. A list item, an entry `name: text` and a table row are sentences of their
own, and indented blocks are code. Inline code is one word, and is never searched: backticks may quote a bad phrase.
"""

import argparse
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("jpaged", "models", "serving", "pallas_kernels")
MAX_WORDS = 30
CODE = "\ufffc"  # stands for each character of inline code

# pattern -> better words. A pattern is a regular expression of whole words; "^" means that a text begins with it.
RULES = r"""
so (?:many|much)(?! that\b| (?:faster|slower|more|less|better|worse|larger|smaller)\b) -> the number or its name
as far as(?! (?:possible|known)\b) -> if, until, up to
as many(?: \w+)? as (?:it|they|there (?:is|are)(?= left|[.,;:)])) -> all N, one per ..., up to `limit`
who(?:m|so)?ever|(?:some|any|every|no)body|the one who(?:se)? -> the caller, the client, a request, no request
(?:requests?|beams?|rows?) who|(?<!user\s)who (?:passes|waits|gives|came first|comes later|runs) -> which request
what (?:it|they) (?:holds?|has|have|had|gives?|gave|got|stands?)(?! (?:to|for)\b) -> name it: its blocks, the result
what (?:the|a|each|its|all|every) [\w'-]+ (?:holds?|gives?|gave)|what there (?:is|are) -> name it
what(?:ever)? (?:stands?|is beyond)|what (?:comes?|came)(?! (?:next|first|before|after)\b) -> name it: the input
(?:whatever|wherever) (?:it|they|there|of|comes) -> any, every, at any position
those that are left|those of which|(?:of|behind) (?:which|whom) -> start a sentence with the noun
that one(?=[.,;:)]| (?:has|is|was|does)\b)|the others' -> repeat the noun
else than|other ones|(?:is|are|be) (?:another|others?) than -> other than, differs from
(?<!there\s)(?:it|that|which|they) (?:is|are) none -> is not one
as of CODE|up to and with|until when -> the same as, up to and including, the step at which
(?:is|are|was|were) not there(?! an?\b)|(?:is|are) (?:already there|there already) -> is missing, exists, is loaded
comes? to its end|makes? of|on (?:its|their) way(?! (?:to|from|through|out)\b) -> ends; the result's name; in flight
^What(?! (?:if|about|to)\b)(?![^.\n]*\?) -> start with the noun or the verb
^Of (?:an?|all|the(?! \d)|its|their|such|one|two|each|every) -> start with the subject
^Most (?!of\b)\w+ (?:of|that|an?|in|which|computed) -> Maximum number of, Largest
anew|thereby|whence|thence|(?:there|where|here)(?:in|of|by|upon)|hitherto|lest|whilst|amongst -> plain words
albeit|unto|forthwith|(?<!once\s)upon|but for|by (?:it|them)sel(?:f|ves) alone -> though, on, except, only
(?:to be|is|are|was|were) had|spoken for|(?:goes?|went) without(?! saying\b)|of no use -> available, assigned, unused
(?:be|been|has|is|are) seen to|one's own|rather (?:no|too)|to the bit(?=[.,;:)]) -> checked, its own, bit for bit
as (?:the |an? )?[\w']+(?: \w+)? (?:has|have) (?:it|them)(?=[.,;:)])|says? of (?:it|them)sel(?:f|ves) -> as in X
beside|for people(?! (?:who|to|with)\b) -> in the same batch, next to, in addition to; readable
(?<!far\s)behind(?! (?:by\b|\||(?:an?|the|its|your) (?:\w+ )?(?:proxy|balancer|flag|option|lock|figures?)\b)) -> after
stands? (?:in|at|there|behind|before|where|between|on|as|after|nowhere)(?! for\b) -> is in, appears, starts
(?:lies?|lay|lain) (?:behind|on|at|there|where|before|apart|in|inside|as|over) -> is in, is stored in
told(?! apart\b)|tells? (?:of|about)|said once -> reported, logged, describe
(?:give|gives|given|gave|giving)(?: \w+)? (?:back|out|way) -> free, return, emit, is preempted
lets? go(?: of)?|(?:throws?|threw|thrown) (?:it|them|one another) out|that (?:is|are) done with -> free, drop, evict
(?<!time\s)(?:goes?|went|going) by(?! the name\b)|(?:had|has|have) (?:a |no )?part in -> depends on, affects
(?:be|is|are|was|were) passed over|(?:engine's|whose) books|of equals -> skipped, bookkeeping, ties
"""


def compiled(pattern: str) -> re.Pattern[str]:
    """A rule's pattern: whole words in any case. A space matches one line break at most."""
    opening = pattern.startswith("^")
    body = pattern.removeprefix("^").replace("CODE", CODE + "+").replace(" ", r"(?:[ \t]*\n[ \t]*|[ \t]+)")
    start = r"\A" if opening else r"(?<!\w)"
    return re.compile(rf"{start}(?:{body})(?!\w)", 0 if opening else re.IGNORECASE)


PATTERNS = [(compiled(row.split(" -> ")[0]), row.split(" -> ")[1]) for row in RULES.strip().splitlines()]
INLINE = re.compile(r"(`+)(?!`)(?:[^`\n]|\n(?!\s*\n))+?\1(?!`)")
BLOCK = re.compile(rf"\s*(?:[-*+|]|\d+[.)]\s|[\w*.\[\]{CODE}, ]+:\s)|\s*\S.*?\S {{3,}}\S")


def python_texts(source: str, *, messages: bool) -> Iterator[tuple[int, str, bool]]:
    """Line, text and "is a docstring" of docstrings, comments, and messages. Comments on consecutive lines are one."""
    begins, last = True, (0, 0)  # a logical line begins; end and column of the last comment
    comment: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        alone = token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
        if comment and token.type != tokenize.NL and not (alone and token.start == (last[0] + 1, last[1])):
            yield comment[0][0], "\n".join(text for _, text in comment), False
            comment = []
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(?:!|fmt:|noqa|type:|ty:|pragma)", token.string):
            comment.append((token.start[0], token.string.lstrip("#").strip()))
            last = token.start
        elif tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE"):
            text = re.sub(r"^\w*(\"\"\"|'''|\"|')|(\"\"\"|'''|\"|')$", "", token.string)
            if begins or (messages and len(text.split()) >= 4):
                yield token.start[0], text, begins
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def sentences(docstring: str) -> Iterator[tuple[int, str]]:
    """Sentences with the number of their first line, from 0. Code is left out."""
    lines = docstring.split("\n")
    base = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    blocks: list[tuple[int, list[str]]] = []
    item = joins = False
    for number, line in enumerate(lines):
        indent = base if number == 0 else len(line) - len(line.lstrip())
        starts = bool(BLOCK.match(line))
        item = (item or starts) and bool(line.strip())
        is_code = indent > base and not item
        if line.strip() and not is_code:
            if not joins or starts:
                blocks.append((number, []))
            blocks[-1][1].append(line.strip())
        joins = bool(line.strip()) and not is_code
    for number, block in blocks:
        for sentence in re.split(r"(?<!e\.g)(?<!i\.e)(?<!\.\.)(?<=[.!?])[\"')\]*]*\s+", " ".join(block)):
            yield number, sentence


def check(path: str, source: str) -> Iterator[str]:
    """Findings of a file, each as `path:line: ...`."""
    if path.endswith(".md"):
        fences = re.compile(r"^( {0,3})(```+|~~~+).*?^\1\2", re.MULTILINE | re.DOTALL)
        source = fences.sub(lambda found: "\n" * found.group().count("\n"), source)
        texts = [(1, re.sub(r"\]\([^)\n]*\)", "]", source), False)]
    else:
        texts = list(python_texts(source, messages=path.split("/")[0] in PRODUCT))
    for line, raw, is_docstring in texts:
        text = INLINE.sub(lambda found: re.sub(r"[^\n]", CODE, found.group()), raw)
        for pattern, better in PATTERNS:
            for found in pattern.finditer(text):
                at = line + text.count("\n", 0, found.start())
                yield f'{path}:{at}: "{" ".join(found.group().split())}": {better}'
        for number, sentence in sentences(text) if is_docstring else ():
            plain = re.sub(rf"{CODE}[{CODE}\s]*", " code ", sentence)
            if (words := sum(any(map(str.isalpha, word)) for word in plain.split())) > MAX_WORDS:
                yield f"{path}:{line + number}: {words} words, at most {MAX_WORDS}: {sentence[:60]} ..."


def main() -> int:
    """Print the findings. Returns 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["*.py", "README.md", "docs/*.md"], help="files and folders")
    listed = ["git", "-C", str(ROOT), "ls-files", "-s", "--", *parser.parse_args().paths]
    rows = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()
    files = [row.split("\t")[1] for row in rows if not row.startswith("120000")]  # that is the mode of a link
    found = [line for file in files if file.endswith((".py", ".md")) for line in check(file, (ROOT / file).read_text())]
    print(*found, f"{len(found)} findings in {len(files)} files", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
