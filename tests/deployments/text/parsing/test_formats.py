"""The tables of formats: every name finds its row, and marks do not look alike."""

import pytest

from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    find_reasoning_format,
    find_tool_format,
)

VLLM_TOOLS = """
    deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 cohere_command3 cohere_command4
    ernie45 glm45 glm47 ling3 hy_v3 hy_v4 kimi_k3 minimax_m3 poolside_v1 step5 qwen3_json dots
    granite-20b-fc granite granite4 hermes hunyuan_a13b internlm jamba lfm2
    kimi_k2 llama3_json llama4_json llama4_pythonic longcat mimo minimax minimax_m2 minicpm5
    mistral olmo3 openai phi4_mini_json pythonic qwen3_coder qwen3_xml seed_oss step3 step3p5 xlam
    gigachat3 functiongemma gemma4
""".split()
VLLM_REASONING = """
    deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 cohere_command3 cohere_command4 ernie45
    gemma4 glm45 glm47 openai_gptoss granite holo2 hunyuan_a13b kimi_k2 mimo minimax_m2
    minimax_m2_append_think mistral nemotron_v3 olmo3 qwen3 seed_oss step3 step3p5 step5 ling3
    hy_v3 hy_v4 kimi_k3 minimax_m3 poolside_v1 granite_thinking_parser
""".split()


@pytest.mark.parametrize("name", VLLM_TOOLS)
def test_names_of_vllm_find_a_tool_format(name: str) -> None:
    assert find_tool_format(name) is not None
    assert find_tool_format(name.upper().replace("_", "-")) is find_tool_format(name)


@pytest.mark.parametrize("name", VLLM_REASONING)
def test_names_of_vllm_find_a_reasoning_format(name: str) -> None:
    assert find_reasoning_format(name) is not None


def test_unknown_names_find_nothing() -> None:
    assert find_tool_format("auto") is None
    assert find_reasoning_format("") is None


@pytest.mark.parametrize("rows", [TOOL_FORMATS, REASONING_FORMATS], ids=["tools", "reasoning"])
def test_each_name_belongs_to_one_row(rows: "dict[str, ToolFormat]") -> None:
    names = [name for row in rows.values() for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", TOOL_FORMATS.values(), ids=lambda row: row.name)
def test_a_row_says_where_calls_begin(row: ToolFormat) -> None:
    assert row.bare or row.begins
    for trigger in row.triggers:
        assert any(trigger in mark for mark in row.begins), trigger
    for token in row.tokens:
        assert token in row.marks
