"""Tools that requests offer, and chat templates that support them, by the tool parser's name."""

from tests.support.tool_calls import SCHEMAS

TEMPLATES = {
    "hermes": "{{ tools }} {{ enable_thinking }} {{ documents }} <tool_call>", "mistral": "{{ tools }} [TOOL_CALLS]",
    "llama3_json": "{{ tools }} <|python_tag|>", "pythonic": "{{ tools }} [func_name1(a)]", "json": "{{ tools }}",
    "qwen3_coder": "{{ tools }} <tool_call>\n<function=f><parameter=k>",
    "seed_oss": "{{ tools }} <seed:tool_call><function=f>",
    "glm45": "{{ tools }} <tool_call>f\n<arg_key>k</arg_key>\n<arg_value>",
    "glm47": "{{ tools }} <tool_call>f<arg_key>k</arg_key><arg_value>",
    "minimax_m2": "{{ tools }} <minimax:tool_call>", "deepseek_v32": "{{ tools }} <｜DSML｜function_calls>",
    "deepseek_v4": "{{ tools }} <｜DSML｜tool_calls>", "deepseek_v31": "{{ tools }} <｜tool▁calls▁begin｜>",
    "deepseek_v3": "{{ tools }} <｜tool▁calls▁begin｜> ```json", "kimi_k2": "{{ tools }} <|tool_calls_section_begin|>",
    "gemma4": "{{ tools }} <|tool_call>call:f", "granite": "{{ tools }} <|tool_call|>",
    "llama4_pythonic": "{{ tools }} <|python_start|>",
    "openai": "{{ tools }} <|start|>assistant<|channel|>final<|message|>",
}  # fmt: skip
OFFERED = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in sorted(SCHEMAS.items())
]
