"""The check of prose: what it reads of a file, each rule on an example, sentences, exceptions and the command line."""

import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import check_prose
from check_prose import Allowed, Finding, apply_allowed, check_source
from prose_rules import RULES

pytestmark = pytest.mark.slow  # no default test: the engine does not depend on it


def found(source: str, path: str = "jpaged/example.py") -> list[tuple[int, str, str]]:
    """(line, rule, text) of every finding."""
    return [(finding.line, finding.rule, finding.text) for finding in check_source(path, source)]


# -- what is read -------------------------------------------------------------------------------------------------


def test_docstrings_of_modules_functions_and_fields():
    source = '"""Keeps so many."""\n\nclass A:\n    x: int\n    """\n    Computed\n    anew.\n    """\n'
    assert found(source) == [(1, "so many", "so many"), (7, "anew", "anew")]


def test_a_continued_opening_line_keeps_line_numbers():
    assert found('"""\\\nFirst.\nIt is computed anew.\n"""\n') == [(3, "anew", "anew")]


def test_comments():
    source = "a = 1  # computed anew\n# The rows of\n# which two are free.\nb = '# anew'\n"
    assert found(source) == [(1, "anew", "anew"), (2, "of which", "of which")]


def test_comments_at_the_end_of_lines_are_not_joined():
    assert not found("a = 1  # int32, of\nb = 2  # which row\n")


@pytest.mark.parametrize("comment", ["# fmt: skip", "# noqa: anew", "# type: ignore[anew]", "#!/usr/bin/anew"])
def test_directives_are_not_read(comment):
    assert not found(comment + "\n")


def test_messages_of_the_product_only():
    source = 'raise ValueError(\n    f"the pool has {n} blocks, "\n    f"it takes so many of {n!r}: ask for fewer"\n)\n'
    assert found(source) == [(3, "so many", "so many")]
    assert found(source, "serving/example.py")
    assert not found(source, "tests/example.py")


def test_strings_of_three_words_are_no_messages():
    assert not found("x = 'somebody else here'\n")
    assert found("x = 'somebody else is here'\n")


def test_markdown():
    source = (
        "# Memory\n\nIt takes so\nmany blocks.\n\n```\nso many\n```\n\n    so many\n\n- an item\n\n    of it, anew\n\n"
        "`so many` and [a link](so-many anew)\n\n| so many | `anew` |\n"
    )
    assert found(source, "docs/memory.md") == [
        (3, "so many", "so many"), (14, "anew", "anew"), (18, "so many", "so many"),
    ]  # fmt: skip


def test_inline_code_is_not_read():
    assert not found('"""Rejects `so many` and ``anew``."""\n# `anew`\n')
    assert found('"""An unclosed ` does not hide what follows.\n\nAnew: `x`."""\n') == [(3, "anew", "Anew")]


def test_phrases_span_one_line_break_but_no_blank_line():
    assert found('"""Blocks of so\n    many tokens."""\n') == [(1, "so many", "so many")]
    assert not found('"""Not so\n\n    many tokens."""\n')
    assert not found('"""It is so"""\n# many tokens\n')


def test_links_and_other_files_are_left_out(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.py").write_text("")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("")
    (tmp_path / "notes.md").write_text("")
    (tmp_path / "b.py").symlink_to("models/a.py")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    (tmp_path / "untracked.py").write_text("")
    assert check_prose.tracked_files(tmp_path) == ["docs/a.md", "models/a.py"]
    assert check_prose.selected_files([str(tmp_path / "models")], tmp_path) == ["models/a.py"]
    assert check_prose.selected_files([str(tmp_path / "untracked.py")], tmp_path) == ["untracked.py"]
    with pytest.raises(SystemExit, match="no file or folder"):
        check_prose.selected_files([str(tmp_path / "absent")], tmp_path)


# -- rules --------------------------------------------------------------------------------------------------------

REJECTED = {
    "so many": "It holds so many tokens.",
    "so much": "A colour with so much white in it.",
    "as many as there are": "Takes as many as there are.",
    "as far as": "Computed as far as tokens are known.",
    "whoever": "Free for whoever comes.",
    "somebody": "A block that somebody's request has.",
    "nobody": "The block nobody owns.",
    "who of a request": "All who wait age alike.",
    "the one who": "A key for the one who asks.",
    "what it holds": "A beam gives up what it holds.",
    "what the X holds": "Keeps what the layers gave.",
    "what there is": "Decides by what there is.",
    "what stands": "Reads what stands there.",
    "what comes": "Refuses what came.",
    "what is beyond": "The limit; what is beyond is text.",
    "whatever it is": "Read whatever comes.",
    "wherever it": "Removes a request, wherever it was.",
    "those that are left": "Uses those that are left.",
    "that one": "Without a block that one waits. Only that one.",
    "the others'": "Waits for the others' tokens.",
    "a text": "The value must be a text.",
    "of which": "Blocks, of which two are free.",
    "Of ...": "Frees blocks. Of a hub id only the name.",
    "else than": "Something else than a row.",
    "is no X": "The value is no integer.",
    "is none": "False if it is none.",
    "as of `x`": "Errors as of `generate`.",
    "is not there": "The file is not there.",
    "is there already": "A block that is there already.",
    "is another": "If it is another, ignore.",
    "comes to its end": "The stream comes to its end.",
    "up to and with": "Reads up to and with the tag.",
    "until when": "Finds out until when it runs.",
    "makes of": "The tensor that XLA makes of it.",
    "opens with What": "What a step returns.",
    "opens with Most": "Most tokens of one request.",
    "anew": "Begins anew.",
    "archaic word": "The pages therein.",
    "by itself alone": "Read by itself alone.",
    "but for": "All but for two rows.",
    "is had": "The lock is had.",
    "spoken for": "Rows that are spoken for.",
    "goes without": "The step goes without masks.",
    "seen to": "The check has seen to it.",
    "one's own": "A block of one's own.",
    "of no use": "A value of no use.",
    "rather no": "Rather no answer.",
    "as X has it": "A shape as numpy has it.",
    "says of itself": "Names that it says of itself.",
    "to the bit": "Equal to the bit.",
    "for people": "A name for people.",
    "beside": "The row beside it.",
    "behind": "The token behind it.",
    "stands in": "A text where the tag stands in front; it stands at 0.",
    "lies in": "A block that lies in memory.",
    "on its way": "Tokens on their way.",
    "told": "The reader is told.",
    "tell of": "A device that does not tell.",
    "said once": "No part in it (said once).",
    "give back": "Gives all blocks back.",
    "give out": "Gives out tokens.",
    "let go of": "Lets go of the weights.",
    "throw out": "They throw each other out.",
    "give way": "The newest gives way.",
    "go by": "The engine goes by averages.",
    "have part in": "Requests that had a part in it.",
    "passed over": "Unknown ids are passed over.",
    "done with": "Pages of a tensor that is done with.",
    "books": "The engine's books are wrong.",
    "equals": "The lowest id of equals.",
}

PLAIN = [
    "So many that it overflows.",
    "It is so much faster.",
    "Runs as many threads as there are cores.",
    "Unchanged as far as possible.",
    "A client who waits; those who accept the terms.",
    "What if the pool is full?",
    "Most of the time it is empty.",
    "It copies that one program.",
    "There is no block, and it is no longer free. No tensor is there.",
    "The mode is none, auto or required.",
    "As of JAX 0.11 this holds.",
    "A server behind a proxy, behind by a step.",
    "It stands for a token; a figure that stands out.",
    "The value lies between 0 and 1.",
    "Copied on its way to the host.",
    "The two cases are told apart by length.",
    "A field by the name of the option; as time goes by.",
    "All but two rows. Not for one but several.",
    "Of course the file exists. Of the 5 rows, 2 are free.",
    "Once upon a time.",
    "A text file. A text prompt.",
    "A number of steps, and the number of equal parts.",
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_rejects_its_example(rule):
    assert rule.name in {name for _, name, _ in found(f'"""{REJECTED[rule.name]}"""\n')}
    assert rule.reason
    assert rule.suggestion


@pytest.mark.parametrize("sentence", PLAIN)
def test_plain_english_passes(sentence):
    assert not found(f'"""{sentence}"""\n')


def test_openings_count_at_the_start_of_docstrings_and_comments_only():
    assert [name for _, name, _ in found('x = 1  # What it is\n"""A step. What follows."""\n')] == ["opens with What"]
    assert not found("# What is read\n", "docs/example.md")
    assert not found("raise ValueError('What a value that is')\n")


def test_names_of_rules_are_unique_and_examples_complete():
    assert sorted(REJECTED) == sorted(rule.name for rule in RULES)


def test_rules_take_linear_time():
    """A nested repetition in a pattern would not end on these."""
    for text in ("`" + "x" * 5_000 + "`", "as " + "x" * 5_000, "that " * 1_000, "`x` " * 1_000):
        check_source("docs/example.md", text)


# -- sentences ----------------------------------------------------------------------------------------------------


def words(count: int) -> str:
    return " ".join(["word"] * count)


def long_sentences(docstring: str) -> list[int]:
    """Lines of the sentences that are too long."""
    return [line for line, rule, _ in found(f'"""{docstring}"""\n', "tests/a.py") if rule == check_prose.LONG_SENTENCE]


def test_a_sentence_has_at_most_30_words():
    assert not long_sentences(f"{words(30)}. {words(30)}.")
    assert long_sentences(f"Short.\n\n{words(20)}\n{words(11)}.\n") == [3]
    assert not found(f"# {words(31)}\n")


def test_words():
    assert not long_sentences(f"{words(29)} `one two three` - 5 * 7.")
    assert long_sentences(f"{words(29)} `one` two.")


@pytest.mark.parametrize(
    "docstring",
    [
        f"{words(20)}:\n\n{words(20)}",
        f"{words(20)}:\n- {words(20)}\n  {words(10)}\n- {words(20)}\n1. {words(20)}",
        f"{words(20)}\n\nrows: {words(20)}\nnum_rows, table: {words(20)}\n    {words(8)}\n`x`:   {words(20)}",
        f"{words(20)}:\n\n    {words(40)}\n    {words(40)}\n\n{words(20)}",
        f"{words(20)}\nrows    int32[R]\n{words(20)}",
        f'Is it "{words(20)}?" {words(20)}',
    ],
)
def test_ends_of_sentences(docstring):
    assert not long_sentences(docstring)


def test_abbreviations_and_ellipses_end_no_sentence():
    assert long_sentences(f"{words(20)}, e.g. {words(20)}.")
    assert long_sentences(f"{words(20)} 0, 1, ... {words(20)}.")


def test_long_list_items_and_entries_are_found():
    assert long_sentences(f"Steps:\n- {words(20)}\n  {words(20)}") == [2]
    assert long_sentences(f"Steps.\n\nrows: {words(20)}\n    {words(20)}") == [3]


# -- exceptions and output ----------------------------------------------------------------------------------------

FINDING = Finding("README.md", 3, "so many", "So many", "name the number")


def test_exceptions():
    entry = Allowed("README.md", "so  many", "a quotation")
    assert apply_allowed([FINDING], [entry], ["README.md"]) == ([], [])
    remaining, problems = apply_allowed([FINDING], [Allowed("docs/a.md", "so many", "a quotation")], ["docs/a.md"])
    assert remaining == [FINDING]
    assert problems == ["ALLOWED: docs/a.md: 'so many' matches nothing: remove the entry"]


def test_faulty_exceptions():
    _, problems = apply_allowed([FINDING], [Allowed("README.md", "so many", " ")], ["README.md"])
    assert problems == ["ALLOWED: README.md: 'so many' has no reason"]
    _, problems = apply_allowed([FINDING], [Allowed("README.md", "so many", str(i)) for i in range(21)], [])
    assert problems == ["ALLOWED has 21 entries, at most 20: reword the prose instead"]


def test_an_exception_of_a_file_that_was_not_read_may_match_nothing():
    assert apply_allowed([], [Allowed("README.md", "so many", "a quotation")], ["docs/a.md"]) == ([], [])


def test_lines_of_output():
    assert str(FINDING) == 'README.md:3: phrase "So many": name the number'
    (finding,) = check_source("tests/a.py", f'"""{words(31)}."""\n')
    assert str(finding) == (
        'tests/a.py:1: sentence "word word word word word word word word ...": 31 words, at most 30: split it'
    )


def test_count_table():
    other = Finding("jpaged/a.py", 1, "anew", "anew", "again")
    lines = [line.split() for line in check_prose.count_table([FINDING, other, FINDING]).splitlines()]
    assert lines == [["rule", "jpaged", "docs", "all"], ["so", "many", "2", "2"], ["anew", "1", "1"],
                     ["all", "1", "2", "3"]]  # fmt: skip


def test_command_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "a.py").write_text('"""Begins anew."""\n')
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    monkeypatch.setattr(check_prose, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert check_prose.main([]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith('tools/a.py:1: phrase "anew": "again"')
    assert last == "1 findings in 1 of 1 files"
    assert check_prose.main(["--count", "tools"]) == 1
    assert "anew" in capsys.readouterr().out
    (tmp_path / "tools" / "a.py").write_text('"""Begins again."""\n')
    assert check_prose.main(["tools/a.py"]) == 0
