"""Traces: both formats give the same requests. Errors name line and column, before a run starts."""

import json

import pytest

from jpaged.errors import RequestError
from jpaged.simulator.load import NO_PREFIX, Arrival
from jpaged.simulator.trace import Trace

HEADER = "arrival,prompt_tokens,output_tokens,prefix_id,prefix_tokens,priority"
ROWS = ["0,100,10,a,32,0", "0.5,200,20,,,3", "0.5,50,5,b,,", "1e1,300,30,a,300,-2"]
EXPECTED = [
    Arrival(0.0, 100, 10, 0, 32, 0),
    Arrival(0.5, 200, 20, NO_PREFIX, 0, 3),
    Arrival(0.5, 50, 5, 1, 50, 0),  # only the prefix is named: the whole prompt is shared
    Arrival(10.0, 300, 30, 0, 300, -2),
]


def write(tmp_path, name, *lines):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_csv(tmp_path):
    trace = Trace(write(tmp_path, "a.csv", HEADER, *ROWS), 4096)
    assert (trace.num_requests, trace.has_priorities) == (4, True)
    assert list(trace) == list(trace) == EXPECTED


def test_columns_in_any_order_and_a_byte_order_mark(tmp_path):
    path = write(tmp_path, "a.csv", "\ufeffoutput_tokens, arrival ,prompt_tokens", " 7 , 1.5 ,\t9", "")
    assert list(Trace(path, 100)) == [Arrival(1.5, 9, 7)]


def test_json_lines(tmp_path):
    lines = []
    for row in ROWS:
        fields = dict(zip(HEADER.split(","), row.split(","), strict=True))
        numbers = {key: value if key == "prefix_id" else float(value) for key, value in fields.items() if value}
        lines.append(json.dumps({"prefix_id": None, **numbers}))
    assert list(Trace(write(tmp_path, "a.jsonl", *lines, ""), 4096)) == EXPECTED


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "line 1: column arrival and prompt_tokens and output_tokens missing"),
        (["arrival,prompt_tokens"], "line 1: column output_tokens missing"),
        (["arrival,prompt_tokens,output_tokens,priorty"], "line 1, column 4: must be one of arrival"),
        (["arrival,prompt_tokens,output_tokens,arrival"], "line 1, column 4: given twice"),
        ([HEADER], "has no requests"),
        ([HEADER, "0,1,1,,,", "-1,1,1,,,"], "line 3, column 1 (arrival): must be 0 or more"),
        ([HEADER, "soon,1,1,,,"], "line 2, column 1 (arrival): must be a number"),
        ([HEADER, "nan,1,1,,,"], "line 2, column 1 (arrival): must be a number"),
        ([HEADER, ",1,1,,,"], "line 2, column 1 (arrival): is empty"),
        ([HEADER, "5,1,1,,,", "4.9,1,1,,,"], "line 3, column 1 (arrival): earlier than the line above (5.0)"),
        ([HEADER, "0,0,1,,,"], "line 2, column 2 (prompt_tokens): must be from 1"),
        ([HEADER, "0,1.5,1,,,"], "line 2, column 2 (prompt_tokens): must be a whole number"),
        ([HEADER, "0,1,-3,,,"], "line 2, column 3 (output_tokens): must be from 1"),
        ([HEADER, "0,1,,,,"], "line 2, column 3 (output_tokens): is empty"),
        ([HEADER, "0,90,11,,,"], "line 2, column 3 (output_tokens): prompt (90 tokens) and output are longer than"),
        ([HEADER, "0,9,1,a,10,"], "line 2, column 5 (prefix_tokens): more than the prompt's 9"),
        ([HEADER, "0,9,1,,5,"], "line 2, column 5 (prefix_tokens): needs a prefix_id"),
        ([HEADER, "0,9,1,a,2,high"], "line 2, column 6 (priority): must be a whole number"),
        ([HEADER, "0,9,1"], "line 2: 3 columns, the header has 6"),
        ([HEADER, '0,"9,1'], "cannot be read"),
    ],
)
def test_errors_of_csv(tmp_path, lines, says):
    path = write(tmp_path, "bad.csv", *lines)
    if not lines:
        path.write_text("")
    with pytest.raises(RequestError) as error:
        Trace(path, 100)
    assert says in str(error.value)
    assert "bad.csv" in str(error.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"arrival": 1, "prompt_tokens": 2', "line 2, column 34: Expecting"),
        ("[1, 2, 3]", "line 2: each line must be a JSON object"),
        ('{"arrival": 1, "prompt_tokens": 2}', "line 2: key output_tokens missing"),
        ('{"arrival": 1, "prompt_tokens": 2, "output_tokens": 3, "prio": 1}', "line 2, key 4: must be one of"),
        ('{"arrival": true, "prompt_tokens": 2, "output_tokens": 3}', "line 2, key 'arrival': must be a number"),
        ('{"arrival": -0.1, "prompt_tokens": 2, "output_tokens": 3}', "line 2, key 'arrival': must be 0 or more"),
        ('{"arrival": 1, "prompt_tokens": [2], "output_tokens": 3}', "line 2, key 'prompt_tokens': must be a whole"),
        ('{"arrival": 1, "prompt_tokens": null, "output_tokens": 3}', "line 2, key 'prompt_tokens': is empty"),
        ('{"arrival": 1, "prompt_tokens": 1e400, "output_tokens": 3}', "line 2, key 'prompt_tokens': must be a whole"),
        ("arrival,prompt_tokens,output_tokens", "must end in .csv"),
    ],
)
def test_errors_of_json_lines(tmp_path, line, says):
    path = write(tmp_path, "bad.jsonl", '{"arrival": 0, "prompt_tokens": 2, "output_tokens": 3}', line)
    with pytest.raises(RequestError) as error:
        Trace(path, 100)
    assert says in str(error.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(RequestError, match="cannot be read"):
        Trace(tmp_path / "no.csv", 100)


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="cannot be read"):
        Trace(path, 100)
