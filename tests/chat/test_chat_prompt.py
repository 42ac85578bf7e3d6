"""Conversations are rendered as prompts, and invalid input raises an error that names the field."""

import json
import pathlib

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import jpaged
from jpaged.chat.prompt import RenderOptions, chat_prompt, template_variables
from jpaged.chat.turn import ChatFormats, chat_turn
from jpaged.errors import RequestError
from jpaged.loading import load_tokenizer
from jpaged.parsers.definitions import ToolChoice, checked_tools
from jpaged.parsers.tool_formats import detect_format
from jpaged.text.encoder import TokenLimit
from tests.serving.tool_definitions import TEMPLATES
from tests.text.corpus import DEMO

FOLDER = pathlib.Path(jpaged.__file__).parent / "demo_model"
USER = {"role": "user", "content": "def f(x):"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_developer_is_system_and_text_parts_are_one_text(tokenizer):
    parts = {"role": "user", "content": [{"type": "text", "text": "a = 1"}, {"type": "text", "text": "b = 2"}]}
    token_ids = chat_prompt(tokenizer, [{"role": "developer", "content": "Be brief."}, parts])["prompt_token_ids"]
    assert tokenizer.decode(token_ids) == "# Be brief.\na = 1\nb = 2\n"


@pytest.mark.parametrize(
    ("messages", "parameter"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (USER, "messages"),
        ([USER, "hi"], "messages[1]"),
        ([{"content": "hi"}], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": 3, "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0]"),
    ],
)
def test_an_invalid_message_raises_an_error_that_names_it(tokenizer, messages, parameter):
    with pytest.raises(RequestError) as caught:
        chat_prompt(tokenizer, messages)
    assert caught.value.parameter == parameter


# -- tools, variables and special tokens ------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TOOLS = checked_tools([WEATHER])
# Like Qwen3's template, reduced to the parts under test.
TEMPLATE = """{{- bos_token }}
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + ' ' }}{{- call.function.arguments | tojson }}{{- '</tool_call>' }}
    {%- endfor %}
    {%- if message.tool_call_id is defined %}{{- ' answers ' + message.tool_call_id }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
CONVERSATION = [
    USER,
    {"role": "assistant", "content": None, "reasoning": "Hm.", "refusal": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18 C"},
]  # fmt: skip


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token per byte. The tokenizer writes <s> before every text, and so does its template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", chat_template=TEMPLATE)


def rendered_ids(tokenizer, messages, *, tools=(), chat_template=None, **options) -> list[int]:
    rendered = chat_prompt(tokenizer, messages, chat_template, tools=tools, options=RenderOptions(**options))
    return rendered["prompt_token_ids"]


def rendered(tokenizer, messages, **options) -> str:
    return tokenizer.decode(rendered_ids(tokenizer, messages, **options))


def test_tools_calls_and_results_reach_the_template(byte_tokenizer):
    text = rendered(byte_tokenizer, CONVERSATION, tools=TOOLS)
    definition = {"type": "function", "function": {"name": "get_weather", "description": "",
                  "parameters": WEATHER["function"]["parameters"]}}  # fmt: skip
    assert text == (
        f"<s><|im_start|>system\n<tools>\n{json.dumps(definition)}\n</tools><tool_call><|im_end|>\n"
        "<|im_start|>user\ndef f(x):<|im_end|>\n"
        '<|im_start|>assistant\n<think>Hm.</think><tool_call>get_weather {"city": "Rome"}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n18 C answers call_1<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}},
                                     {"add_generation_prompt": False, "continue_final_message": True}])  # fmt: skip
def test_ids_equal_those_of_transformers(byte_tokenizer, tokenizer, options):
    """The rendering is tokenized without extra special tokens: its only <s> is the template's."""
    ids = rendered_ids(byte_tokenizer, [USER], **options)
    plain = {name: value for name, value in options.items() if name != "chat_template_kwargs"}
    tools = [tool.definition for tool in plain.pop("tools", ())] or None
    kwargs = {"add_generation_prompt": True} | plain | options.get("chat_template_kwargs", {})
    text = byte_tokenizer.apply_chat_template([USER], tokenize=False, tools=tools, **kwargs)
    assert ids == byte_tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(byte_tokenizer.bos_token_id) == 1
    assert byte_tokenizer.encode("x")[0] == byte_tokenizer.bos_token_id  # so encoding the text again would add a <s>
    if not options:
        demo = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
        assert chat_prompt(tokenizer, [USER])["prompt_token_ids"] == demo


def test_a_message_with_reasoning_and_no_content_is_rendered(byte_tokenizer):
    cut = {"role": "assistant", "content": None, "reasoning_content": "Hm"}
    assert "assistant\n<think>Hm</think><|im_end|>" in rendered(byte_tokenizer, [USER, cut, USER])


def test_a_second_bos_is_logged_once(byte_tokenizer, caplog):
    template = "{{ bos_token }}{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    for _ in range(3):
        chat_prompt(byte_tokenizer, [USER], template)
    assert sum("two begin-of-sequence" in line for line in caplog.messages) == 1
    caplog.clear()
    chat_prompt(byte_tokenizer, [USER])
    assert not caplog.messages


def test_arguments_that_are_not_an_object_stay_text(byte_tokenizer):
    empty = [(text, "{}") for text in ("", "null", " null ", '"{}"', "[]", None)]
    objects = [({"a": 1}, '{"a": 1}'), (json.dumps('{"a": 1}'), '{"a": 1}')]
    others = [('{"a": ', '"{\\"a\\": "'), ("[1]", '"[1]"'), ("[" * 10**5, None)]
    for arguments, shown in (*empty, *objects, *others):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        assert f"<tool_call>f {shown or ''}" in rendered(byte_tokenizer, [message])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": None}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}]}, "I cannot."),
    ],
)
def test_answers_that_clients_send_back(byte_tokenizer, fields, text):
    """Without the reasoning, which a client may not know, such as an answer that ended inside it."""
    first, last = ({"role": "user", "content": text} for text in ("q", "go"))
    conversation = [first, {"role": "assistant", **fields}, last]
    said = [first, {"role": "assistant", "content": text}, last]
    assert rendered(byte_tokenizer, conversation) == rendered(byte_tokenizer, said)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"tools": TOOLS, "chat_template": "{{ messages }}"}, "tools"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"documents": [{"text": 3}], "chat_template": "{{ documents }}"}, "documents[0]"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"tokenize": False}, "chat_template": "{{ tokenize }}"},
         "chat_template_kwargs.tokenize"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)  # fmt: skip
def test_input_that_the_template_does_not_read_raises(byte_tokenizer, options, parameter):
    with pytest.raises(RequestError) as caught:
        rendered(byte_tokenizer, [USER], **options)
    assert caught.value.parameter == parameter


def test_a_variable_that_the_template_does_not_read_is_logged_once(byte_tokenizer, caplog):
    for _ in range(2):
        text = rendered(byte_tokenizer, [USER], chat_template_kwargs={"colour": "red"})
    assert text == rendered(byte_tokenizer, [USER])
    logged = "chat_template_kwargs.colour has no effect: the model's chat template does not read it (logged once)"
    assert caplog.messages == [logged]


def test_the_template_decides_about_roles(byte_tokenizer):
    message = {"role": "critic", "content": "Why?"}
    assert "<|im_start|>critic\nWhy?<|im_end|>" in rendered(byte_tokenizer, [message])
    picky = "{% if messages[0].role != 'user' %}{{ raise_exception('no ' + messages[0].role) }}{% endif %}"
    with pytest.raises(RequestError, match="rejects them: no critic"):
        rendered(byte_tokenizer, [message], chat_template=picky)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}{{ messages[0].__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{{ i }}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_raises(byte_tokenizer, template):
    with pytest.raises(RequestError) as caught:
        chat_prompt(byte_tokenizer, [USER], template)
    assert caught.value.parameter == "messages"
    assert len(str(caught.value)) < 3_000


def test_variables_of_a_template():
    for broken in ("{% if %}", "{{ messages | nofilter }}"):
        with pytest.raises(RequestError, match="not a Jinja template"):
            template_variables(broken)
    names = {"bos_token", "tools", "messages", "add_generation_prompt", "enable_thinking"}
    assert template_variables(TEMPLATE) == names
    loop = "{% for m in messages %}{% generation %}{{ x }}{% endgeneration %}{% break %}{% endfor %}"
    assert template_variables(loop) == {"messages", "x"}


# -- turns ------------------------------------------------------------------------------------------------------------


def test_a_turn_has_the_format_and_reasoning_of_its_answers(byte_tokenizer):
    turn = chat_turn(byte_tokenizer, [USER], ChatFormats(), tools=TOOLS)
    assert turn.reader.tool_format.name == "hermes"  # the template says <tool_call>
    assert turn.reader.tool_names == {"get_weather"}
    assert not turn.shows_special_tokens
    assert turn.grammar == {}
    qwen3 = ChatFormats.named(reasoning_parser="qwen3")
    for enabled, opening in ((True, ""), (False, "</think>")):
        options = RenderOptions(chat_template_kwargs={"enable_thinking": enabled})
        turn = chat_turn(byte_tokenizer, [USER], qwen3, options=options)
        assert turn.reader.reasoning.opened is None
        assert turn.reader.parse(opening + "x").content == opening + "x"
    always = ChatFormats.named(reasoning_parser="deepseek_r1")
    assert chat_turn(byte_tokenizer, [USER], always).reader.reasoning.opened
    closed = RenderOptions(chat_template_kwargs={"enable_thinking": False})
    assert not chat_turn(byte_tokenizer, [USER], always, options=closed).reader.reasoning.opened


LONG = "<think>\n" + "It is an arachnid, not an insect. " * 20  # longer than the end of a prompt that is searched
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("begun", "opened"),
    [
        ("<think>", True),
        ("\n<think>\nSpiders are", True),
        (LONG, True),
        ("<think>Count.</think>", False),
        ("<think>Count.</think>\nA spider has", False),
        (LONG + "</think>" + "They have many legs. " * 20, False),
        ("A spider has", False),
        ("Write <think>", False),
        ("", None),
    ],
)
def test_the_last_message_says_whether_an_answer_goes_on_inside_reasoning(byte_tokenizer, parser, begun, opened):
    formats = ChatFormats.named(reasoning_parser=parser, chat_template=PLAIN)
    options = RenderOptions(add_generation_prompt=False, continue_final_message=True)
    for content in (begun, [{"type": "text", "text": begun}]):
        turn = chat_turn(byte_tokenizer, [USER, {"role": "assistant", "content": content}], formats, options=options)
        expected = True if opened is None and parser == "deepseek_r1" else opened
        assert turn.reader.reasoning.opened is expected
        assert turn.sampling_params(jpaged.SamplingParams()).reasoning_tags.opened is expected
        own = turn.sampling_params(jpaged.SamplingParams(reasoning_tags=("<think>", "</think>"))).reasoning_tags
        assert own.opened is opened
    if opened is False:
        assert turn.reader.parse("<think> x").content == "<think> x"


def test_tags_that_are_special_tokens_stay_in_the_text(byte_tokenizer):
    """Without them the text would not have the call. A grammar refers to them by id."""
    turn = chat_turn(
        byte_tokenizer, [USER], ChatFormats.named(tool_call_parser="mistral"), tools=TOOLS,
        tool_choice=ToolChoice("required"),
    )  # fmt: skip
    assert turn.shows_special_tokens
    assert f"<[{byte_tokenizer.convert_tokens_to_ids('[TOOL_CALLS]')}]> call" in turn.grammar["grammar"]
    free = chat_turn(byte_tokenizer, [USER], ChatFormats.named(tool_call_parser="mistral"), tools=TOOLS)
    assert not free.sampling_params(jpaged.SamplingParams()).skip_special_tokens


def test_an_unknown_parser_gets_the_known_names_and_the_nearest():
    for kind, names in (("tool_call", ("hermes", "kimi_k2", "qwen3_xml")), ("reasoning", ("qwen3", "kimi_k2"))):
        with pytest.raises(RequestError, match=r"must be one of .*did you mean kimi_k2") as caught:
            ChatFormats.named(**{f"{kind}_parser": "kimi_k22"})
        assert all(name in str(caught.value) for name in names)
    assert ChatFormats.named(tool_call_parser="qwen3_xml").tool_calls.name == "qwen3_coder"


def test_gpt_oss_reads_the_reasoning_as_thinking(byte_tokenizer):
    template = "{% for message in messages %}{% if message.thinking %}({{ message.thinking }}){% endif %}{% endfor %}"
    messages = [USER, {"role": "assistant", "content": "a", "reasoning": "Hm"}, USER]
    prompt = chat_prompt(byte_tokenizer, messages, template)["prompt_token_ids"]
    assert byte_tokenizer.decode(prompt) == "(Hm)"


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - {"json"}))
def test_the_format_is_found_from_the_template(name):
    assert detect_format(TEMPLATES[name]).name == name


def test_formats_that_no_parser_reads_are_not_taken_for_others():
    for template in ("", "{{ tools }}", "<function=f>{}</function>", "]<]minimax[>[<tool_call>", "<tool_calls>"):
        assert detect_format(template) is None


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"tool_call_parser": "qwen9"}, "tool_call_parser"),
        ({"reasoning_parser": "qwen9"}, "reasoning_parser"),
        ({"reasoning_parser": "qwen3", "reasoning_tags": ("a", "b")}, "reasoning_tags"),
        ({"reasoning_tags": ("a",)}, "reasoning_tags"),
        ({"reasoning_tags": ("a", "a")}, "reasoning_tags"),
        ({"reasoning_tags": ("", "a")}, "reasoning_tags"),
    ],
)
def test_unknown_parsers_and_invalid_tags_raise(options, parameter):
    with pytest.raises(RequestError) as caught:
        ChatFormats.named(**options)
    assert caught.value.parameter == parameter


def test_a_long_conversation_is_tokenised_as_far_as_needed():
    tokenizer = load_tokenizer(DEMO)
    messages = [{"role": "user", "content": "A word, " * 20_000}]
    whole = chat_prompt(tokenizer, messages)["prompt_token_ids"]
    assert whole == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    left = chat_prompt(tokenizer, messages, limit=TokenLimit(50, "left"))["prompt_token_ids"]
    right = chat_prompt(tokenizer, messages, limit=TokenLimit(50, "right"))["prompt_token_ids"]
    assert 50 < len(left) < len(whole) // 2
    assert 50 < len(right) < len(whole) // 2
    assert (left, right) == (whole[-len(left) :], whole[: len(right)])
    with pytest.raises(RequestError, match="have more than 1,000 tokens, a prompt takes at most 1,000") as caught:
        chat_prompt(tokenizer, [{"role": "user", "content": "A word, " * 5_000}], limit=TokenLimit(1_000))
    assert caught.value.parameter == "messages"
