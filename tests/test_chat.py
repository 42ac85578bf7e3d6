"""`LLM.chat`: the prompt is the server's, and answers come as messages where there are tools or reasoning."""

import pytest

from jpaged import LLM, SamplingParams
from jpaged.errors import RequestError

USER = {"role": "user", "content": "def read_json(path):"}
TOOL = {"type": "function", "function": {"name": "now"}}
BODY = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, row_buckets=(8,),
             token_buckets=(64,)) as made:  # fmt: skip
        yield made


def test_chat_with_tools(llm):
    """The template sees them; an answer without calls is all content."""
    template = "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}" + BODY + "{# <tool_call> #}"
    with_tools, also = llm.chat([[USER], [USER, USER]], PARAMS, use_tqdm=False, chat_template=template, tools=[TOOL])
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(with_tools.prompt_token_ids) == f"# now\n{USER['content']}\n"
    for output in (with_tools, also):
        answer = output.outputs[0]
        assert answer.text
        assert (answer.message.content, answer.message.reasoning, answer.message.tool_calls) == (answer.text, None, [])
    plain = llm.chat([USER], PARAMS, use_tqdm=False, chat_template=template)[0]
    assert plain.outputs[0].message is None
    assert tokenizer.decode(plain.prompt_token_ids) == f"{USER['content']}\n"


def test_chat_with_reasoning(llm):
    """A template that opens the tag: the answer goes on with reasoning, and has no end."""
    output = llm.chat(
        [USER], PARAMS, use_tqdm=False, chat_template=BODY + "{{ opening + '<think>\n' }}", reasoning_parser="qwen3",
        chat_template_kwargs={"opening": "# "},
    )[0]  # fmt: skip
    assert llm.get_tokenizer().decode(output.prompt_token_ids).endswith("# <think>\n")
    answer = output.outputs[0]
    assert answer.text.strip()
    assert (answer.message.reasoning, answer.message.content) == (answer.text.lstrip(), None)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"name": "now"}]}, "tools[0]"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ({"tool_call_parser": "qwen9"}, "tool_call_parser"),
    ],
)
def test_what_the_demo_model_cannot_do_is_refused_by_name(llm, options, parameter):
    with pytest.raises(RequestError) as caught:
        llm.chat([USER], PARAMS, use_tqdm=False, **options)
    assert caught.value.parameter == parameter
