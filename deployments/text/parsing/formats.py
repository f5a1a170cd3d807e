"""The formats of public models, by vLLM's names."""

import re
from collections.abc import Iterable

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.text.parsing.format import ReasoningFormat, ToolFormat, with_suffix

AUTO, NONE = "auto", "none"
"""Instead of a name: the row is looked for, or there is none."""

_HARMONY = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)

_OBJECTS = (
    ToolFormat(
        name="hermes",
        aliases=("granite4", "ernie45", "qwen", "qwen25", "qwen3_json"),
        syntax="json",
        call=("<tool_call>\n", "\n</tool_call>"),
        separator="\n",
        triggers=("<tool_call>",),
    ),
    ToolFormat(
        name="longcat",
        syntax="json",
        call=("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
        separator="\n",
        triggers=("<longcat_tool_call>",),
    ),
    ToolFormat(
        name="granite-20b-fc",
        syntax="json",
        call=("<function_call> ", ""),
        separator=" ",
        triggers=("<function_call>",),
    ),
    ToolFormat(
        name="internlm",
        aliases=("internlm2",),
        syntax="json",
        call=("<|action_start|><|plugin|>\n", "<|action_end|>"),
        separator="\n",
        arguments_key="parameters",
        tokens=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        triggers=("<|plugin|>",),
    ),
    ToolFormat(
        name="llama3_json",
        aliases=("llama3", "llama4_json"),
        syntax="json",
        separator="; ",
        arguments_key="parameters",
        bare=True,
        openings=("<|python_tag|>",),
    ),
    ToolFormat(
        name="minimax",
        syntax="json",
        section=("<tool_calls>\n", "\n</tool_calls>"),
        separator="\n",
        triggers=("<tool_calls>",),
    ),
    ToolFormat(
        name="gigachat3",
        syntax="json",
        call=("function call<|role_sep|>\n", ""),
        openings=("<|message_sep|>\n\nfunction call<|role_sep|>", "<|function_call|>"),
        tokens=("<|message_sep|>", "<|role_sep|>", "<|function_call|>"),
    ),
)

_LISTS = (
    ToolFormat(
        name="granite",
        syntax="json",
        layout="list",
        section=("<|tool_call|>", ""),
        openings=("<tool_call>",),
        triggers=("<|tool_call|>",),
    ),
    ToolFormat(
        name="phi4_mini_json",
        syntax="json",
        layout="list",
        section=("functools", ""),
        openings=("<|tool_call|>", "<|tool_calls|>"),
        closings=("<|/tool_call|>", "<|/tool_calls|>"),
    ),
    ToolFormat(
        name="jamba",
        aliases=("hunyuan_a13b",),
        syntax="json",
        layout="list",
        section=("<tool_calls>", "</tool_calls>"),
        triggers=("<tool_calls>",),
    ),
    ToolFormat(
        name="nemotron_json",
        syntax="json",
        layout="list",
        section=("<TOOLCALL>", "</TOOLCALL>"),
        triggers=("<TOOLCALL>",),
    ),
    ToolFormat(
        name="xlam",
        syntax="json",
        layout="list",
        bare=True,
        openings=("```json", "<tool_call>", "[TOOL_CALLS]"),
        closings=("```", "</tool_call>"),
    ),
    ToolFormat(
        name="cohere_command",
        aliases=("cohere_command3", "cohere_command4"),
        syntax="json",
        layout="list",
        section=("<|START_ACTION|>", "<|END_ACTION|>"),
        name_key="tool_name",
        arguments_key="parameters",
        id_key="tool_call_id",
        triggers=("<|START_ACTION|>",),
    ),
    ToolFormat(
        name="mistral",
        syntax="json",
        layout="list",
        section=("[TOOL_CALLS]", ""),
        id_key="id",
        id_style="mistral",
        function=("", "[ARGS]"),  # newer models: see mistral_args
        id_mark="[CALL_ID]",
        triggers=("[TOOL_CALLS]",),
    ),
    ToolFormat(
        name="json",
        syntax="json",
        layout="list",
        arguments_key="parameters",
        bare=True,
    ),
)

_NAMED = (
    ToolFormat(
        name="mistral_args",
        syntax="json",
        layout="named",
        call=("[TOOL_CALLS]", ""),
        function=("", "[ARGS]"),
        id_mark="[CALL_ID]",
        id_style="mistral",
        triggers=("[TOOL_CALLS]",),
    ),
    ToolFormat(
        name="deepseek_v3",
        aliases=("deepseekv3",),
        syntax="json",
        layout="named",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        separator="\n",
        function=("function<｜tool▁sep｜>", "\n"),
        arguments=("```json\n", "\n```"),
        tokens=("<｜tool▁sep｜>",),
        triggers=("<｜tool▁call▁begin｜>",),
    ),
    ToolFormat(
        name="deepseek_v31",
        aliases=("deepseekv31",),
        syntax="json",
        layout="named",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        function=("", "<｜tool▁sep｜>"),
        triggers=("<｜tool▁call▁begin｜>",),
    ),
    ToolFormat(
        name="kimi_k2",
        syntax="json",
        layout="named",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        function=("", "<|tool_call_argument_begin|>"),
        id_style="kimi",
        openings=("<|tool_call_section_begin|>",),
        closings=("<|tool_call_section_end|>",),
        triggers=("<|tool_call_begin|>",),
    ),
    ToolFormat(
        name="openai",
        aliases=("gpt-oss", "gpt_oss"),
        syntax="channels",
        layout="named",
        call=("<|channel|>commentary", "<|call|>"),
        separator="<|start|>assistant",
        function=(" to=functions.", " <|constrain|>json<|message|>"),
        tokens=_HARMONY,
    ),
)

_TAGGED = (
    ToolFormat(
        name="qwen3_coder",
        aliases=("qwen3_xml", "step3p5", "step5", "mimo"),
        syntax="tagged",
        call=("<tool_call>\n", "\n</tool_call>"),
        separator="\n",
        function=("<function=", ">\n"),
        key=("<parameter=", ">\n"),
        value=("", "\n</parameter>\n"),
        arguments=("", "</function>"),
        triggers=("<tool_call>",),
    ),
    ToolFormat(
        name="seed_oss",
        syntax="tagged",
        call=("<seed:tool_call>\n", "\n</seed:tool_call>"),
        separator="\n",
        function=("<function=", ">\n"),
        key=("<parameter=", ">"),
        value=("", "</parameter>\n"),
        arguments=("", "</function>"),
        triggers=("<seed:tool_call>",),
    ),
    ToolFormat(
        name="deepseek_v32",
        syntax="tagged",
        section=("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
        separator="\n",
        function=('<｜DSML｜invoke name="', '">\n'),
        key=('<｜DSML｜parameter name="', '" string="true">'),
        json_key_end='" string="false">',
        value=("", "</｜DSML｜parameter>\n"),
        arguments=("", "</｜DSML｜invoke>"),
        tokens=("｜DSML｜",),
        triggers=("｜DSML｜",),
    ),
    ToolFormat(
        name="deepseek_v4",
        syntax="tagged",
        section=("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"),
        separator="\n",
        function=('<｜DSML｜invoke name="', '">\n'),
        key=('<｜DSML｜parameter name="', '" string="true">'),
        json_key_end='" string="false">',
        value=("", "</｜DSML｜parameter>\n"),
        arguments=("", "</｜DSML｜invoke>"),
        tokens=("｜DSML｜",),
        triggers=("｜DSML｜",),
    ),
    ToolFormat(
        name="deepseek_v41",
        syntax="tagged",
        section=("<｜DSML｜ calls>\n", "\n</｜DSML｜ calls>"),
        separator="\n",
        function=('<｜DSML｜ invoke name="', '">\n'),
        key=('<｜DSML｜ parameter name="', '" string="true">'),
        json_key_end='" string="false">',
        value=("", "</｜DSML｜ parameter>\n"),
        arguments=("", "</｜DSML｜ invoke>"),
        tokens=("｜DSML｜",),
        triggers=("｜DSML｜",),
    ),
    ToolFormat(
        name="glm45",
        aliases=("poolside_v1",),
        syntax="tagged",
        call=("<tool_call>", "</tool_call>"),
        separator="\n",
        function=("", "\n"),
        key=("<arg_key>", "</arg_key>\n"),
        value=("<arg_value>", "</arg_value>\n"),
        triggers=("<tool_call>",),
    ),
    ToolFormat(
        name="glm47",
        aliases=("ling3",),
        syntax="tagged",
        call=("<tool_call>", "</tool_call>"),
        function=("", ""),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        triggers=("<tool_call>",),
    ),
    ToolFormat(
        name="hy_v3",
        syntax="tagged",
        section=("<tool_calls>\n", "\n</tool_calls>"),
        call=("<tool_call>", "</tool_call>"),
        separator="\n",
        function=("", "<tool_sep>\n"),
        key=("<arg_key>", "</arg_key>\n"),
        value=("<arg_value>", "</arg_value>\n"),
        suffixed=True,
        triggers=("<tool_call>",),
    ),
    ToolFormat(
        name="hy_v4",
        syntax="tagged",
        section=("<tool_calls>", "</tool_calls>"),
        call=("<tool_call>", "</tool_call>"),
        function=("", ""),
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        suffixed=True,
        triggers=("<tool_call>",),
    ),
    ToolFormat(
        name="kimi_k3",
        syntax="tagged",
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        function=('<|open|>call tool="', '"<|sep|>'),
        id_mark='" index="',
        numbered=True,
        key=('<|open|>argument key="', '" type="string"<|sep|>'),
        json_key_end='" type="TYPE"<|sep|>',
        escapes_keys=True,
        value=("", "<|close|>argument<|sep|>"),
        arguments=("", "<|close|>call<|sep|>"),
        frame=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    ToolFormat(
        name="minimax_m2",
        syntax="tagged",
        section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        separator="\n",
        function=('<invoke name="', '">\n'),
        key=('<parameter name="', '">'),
        value=("", "</parameter>\n"),
        arguments=("", "</invoke>"),
        triggers=("<minimax:tool_call>",),
    ),
    ToolFormat(
        name="minimax_m3",
        syntax="elements",
        section=("]<]minimax[>[<tool_call>\n", "\n]<]minimax[>[</tool_call>"),
        separator="\n",
        function=(']<]minimax[>[<invoke name="', '">'),
        key=("]<]minimax[>[<", ">"),
        value=("", "]<]minimax[>[</"),
        arguments=("", "]<]minimax[>[</invoke>"),
        tokens=("]<]minimax[>[", "<tool_call>", "</tool_call>"),
        triggers=("]<]minimax[>[",),
    ),
    ToolFormat(
        name="dots",
        syntax="tagged",
        section=("<dots_function_call>\n", "\n</dots_function_call>"),
        separator="\n",
        function=('<invoke name="', '">\n'),
        key=('<parameter name="', '">'),
        value=("", "</parameter>\n"),
        arguments=("", "</invoke>"),
        triggers=("<dots_function_call>",),
    ),
    ToolFormat(
        name="minicpm5",
        syntax="tagged",
        separator="\n",
        function=('<function name="', '">'),
        key=('<param name="', '">'),
        value=("", "</param>"),
        arguments=("", "</function>"),
    ),
    ToolFormat(
        name="step3",
        syntax="tagged",
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        call=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
        function=('<steptml:invoke name="', '">'),
        key=('<steptml:parameter name="', '">'),
        value=("", "</steptml:parameter>"),
        arguments=("", "</steptml:invoke>"),
        tokens=("<｜tool_call_begin｜>", "<｜tool_sep｜>"),
        triggers=("<｜tool_sep｜>",),
    ),
    ToolFormat(
        name="gemma4",
        syntax="braces",
        call=("<|tool_call>", "<tool_call|>"),
        function=("call:", ""),
        quote='<|"|>',
        triggers=("<|tool_call>",),
    ),
    ToolFormat(
        name="functiongemma",
        syntax="braces",
        call=("<start_function_call>", "<end_function_call>"),
        function=("call:", ""),
        quote="<escape>",
        triggers=("<start_function_call>",),
    ),
)

_PYTHON = (
    ToolFormat(name="pythonic", syntax="python", layout="list", separator=", ", bare=True),
    ToolFormat(
        name="llama4_pythonic",
        syntax="python",
        layout="list",
        separator=", ",
        bare=True,
        openings=("<|python_start|>",),
        closings=("<|python_end|>",),
    ),
    ToolFormat(
        name="olmo3",
        syntax="python",
        layout="lines",
        section=("<function_calls>", "</function_calls>"),
        separator="\n",
    ),
    ToolFormat(
        name="lfm2",
        syntax="python",
        layout="list",
        section=("<|tool_call_start|>", "<|tool_call_end|>"),
        separator=", ",
        triggers=("<|tool_call_start|>",),
    ),
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    row.name: row for row in (*_OBJECTS, *_LISTS, *_NAMED, *_TAGGED, *_PYTHON)
}

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    row.name: row
    for row in (
        ReasoningFormat(
            name="think",
            aliases=(
                *("qwen3", "kimi_k2", "glm45", "glm47", "ling3", "minimax_m2", "mimo"),
                *("nemotron_v3", "granite_thinking_parser"),
            ),
            open=("<think>",),
            close=("</think>",),
            ends_at_call=True,
        ),
        ReasoningFormat(
            name="deepseek_r1",
            aliases=(
                *("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "deepseek_v41"),
                *("minimax_m2_append_think", "olmo3", "holo2", "step3", "step3p5", "step5"),
                "poolside_v1",
            ),
            open=("<think>",),
            close=("</think>",),
        ),
        ReasoningFormat(
            name="hunyuan_a13b",
            open=("<think>",),
            close=("</think>",),
            dropped=("<answer>", "</answer>"),
        ),
        ReasoningFormat(
            name="ernie45",
            open=("<think>",),
            close=("</think>",),
            ends_at_call=True,
            dropped=("<response>", "</response>"),
        ),
        ReasoningFormat(
            name="hy_v4",
            aliases=("hy_v3",),
            open=("<think>",),
            close=("</think>",),
            suffixed=True,
        ),
        ReasoningFormat(
            name="kimi_k3",
            open=("<|open|>think<|sep|>",),
            close=("<|close|>think<|sep|>",),
            dropped=(
                *("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
                *("<|end_of_msg|>", "<|close|>message<|sep|>"),
            ),
            tokens=("<|open|>", "<|close|>", "<|sep|>"),
        ),
        ReasoningFormat(name="minimax_m3", open=("<mm:think>",), close=("</mm:think>",)),
        ReasoningFormat(name="mistral", open=("[THINK]",), close=("[/THINK]",)),
        ReasoningFormat(name="seed_oss", open=("<seed:think>",), close=("</seed:think>",)),
        ReasoningFormat(name="longcat", open=("<longcat_think>",), close=("</longcat_think>",)),
        ReasoningFormat(
            name="cohere_command",
            aliases=("cohere_command3", "cohere_command4"),
            open=("<|START_THINKING|>",),
            close=("<|END_THINKING|>",),
            ends_at_call=True,
            dropped=(
                *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
                *("<|START_TEXT|>", "<|END_TEXT|>"),
            ),
        ),
        ReasoningFormat(
            name="gemma4",
            open=("<|channel>thought",),
            close=("<channel|>",),
            tokens=("<|channel>",),
        ),
        ReasoningFormat(
            name="openai_gptoss",
            aliases=("openai", "gpt_oss", "gpt-oss"),
            open=("<|channel|>analysis<|message|>",),
            close=("<|end|>",),
            channels=True,
            tokens=_HARMONY,
        ),
        ReasoningFormat(
            name="granite",
            open=("Here is my thought process:", "Here's my thought process:"),
            close=("Here is my response:", "Here's my response:"),
        ),
    )
}


def suffix_of(texts: Iterable[str]) -> str:
    """Returns what the tags of Hunyuan end with in texts, such as ``:opensource``, or ""."""
    return next((match[1] for text in texts if (match := _SUFFIXED.search(text))), "")


def tool_rows(suffix: str = "") -> list[ToolFormat]:
    """Returns the rows of tools, whose tags have this suffix where they may have one."""
    return [with_suffix(row, suffix) for row in TOOL_FORMATS.values()]


def reasoning_rows(suffix: str = "") -> list[ReasoningFormat]:
    """Returns the rows of thoughts, whose tags have this suffix where they may have one."""
    return [with_suffix(row, suffix) for row in REASONING_FORMATS.values()]


def find_tool_format(name: str) -> ToolFormat | None:
    """Returns the row of this name or alias, or None."""
    return TOOL_FORMATS.get(_resolve(name, _TOOL_NAMES))


def find_reasoning_format(name: str) -> ReasoningFormat | None:
    """Returns the row of this name or alias, or None."""
    return REASONING_FORMATS.get(_resolve(name, _REASONING_NAMES))


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Raises:
    InvalidConfig: there is no row of this name.
    """
    if tool_parser not in (AUTO, NONE) and find_tool_format(tool_parser) is None:
        names = ", ".join((AUTO, NONE, *TOOL_FORMATS))
        raise InvalidConfig(
            f"tool_call_parser must be one of {names}, got {tool_parser!r}", "tool_call_parser"
        )
    if reasoning_parser not in (AUTO, NONE) and find_reasoning_format(reasoning_parser) is None:
        names = ", ".join((AUTO, NONE, *REASONING_FORMATS))
        raise InvalidConfig(
            f"reasoning_parser must be one of {names}, got {reasoning_parser!r}",
            "reasoning_parser",
        )


def _names(rows: "dict[str, ToolFormat] | dict[str, ReasoningFormat]") -> dict[str, str]:
    names = {_plain(alias): row.name for row in rows.values() for alias in row.aliases}
    return names | {_plain(name): name for name in rows}


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _resolve(name: str, names: dict[str, str]) -> str:
    return names.get(_plain(name), "")


_SUFFIXED = re.compile(r"<(?:think|tool_calls?)(:[\w.+-]+)>")
_TOOL_NAMES = _names(TOOL_FORMATS)
_REASONING_NAMES = _names(REASONING_FORMATS)
