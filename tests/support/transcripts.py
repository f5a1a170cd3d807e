"""Answers as public models write them, by the row of their format, and what they mean."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from rayfin.deployments.text.parsing.events import Event

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
}
SEARCH = {
    "type": "object",
    "properties": {
        "query": {"$ref": "#/$defs/text"},
        "filters": {"type": "object"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "exact": {"type": "boolean"},
        "limit": {"type": ["integer", "null"]},
        "score": {"type": "number"},
    },
    "$defs": {"text": {"type": "string"}},
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": WEATHER,
    "search": SEARCH,
    "get_time": {},
}
PARIS = ("get_weather", {"city": "Paris"})
ROME = ("get_weather", {"city": "Rome", "days": 3})
TIME = ("get_time", {})


class Transcript(NamedTuple):
    """An answer and its parts. ``calls`` are names and arguments."""

    tools: str
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    content: str = ""
    reasoning: str = ""
    thinks: str = ""  # the row of the reasoning format
    starts_inside: bool = False
    unparsed: int = 0


T = Transcript
JSON_ROWS = (
    T(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        (PARIS,),
    ),
    T(
        "hermes",
        "I will look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"city": "Rome", "days": 3}, "name": "get_weather"}\n'
        '</tool_call>\n<tool_call>{"name": "get_time"}</tool_call>',
        (PARIS, ROME, TIME),
        "I will look.",
    ),
    T(
        "hermes",
        "<think>\nParis, then.\n</think>\n\n"
        '<tool_call>\n{"name": "search", "arguments": {"query": "a </tool_call> b \\"é\\""}}\n'
        "</tool_call>",
        (("search", {"query": 'a </tool_call> b "é"'}),),
        reasoning="Paris, then.",
        thinks="qwen3",
    ),
    T(
        "hermes",
        '<tool_call>\n{"name": "unknown", "arguments": {"a": 1}}\n</tool_call> Sorry.',
        (),
        '<tool_call>\n{"name": "unknown", "arguments": {"a": 1}}\n</tool_call> Sorry.',
        unparsed=1,
    ),
    T("hermes", "Write <tool_call> before it.", (), "Write <tool_call> before it.", unparsed=1),
    T(
        "longcat",
        '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        "</longcat_tool_call>\n",
        (PARIS,),
    ),
    T(
        "granite-20b-fc",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}} '
        '<function_call> {"name": "get_time", "arguments": {}}',
        (PARIS, TIME),
    ),
    T(
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_time", "arguments": {}}]',
        (PARIS, TIME),
    ),
    T("granite", '<tool_call>[{"name": "get_time", "arguments": {}}]', (TIME,)),
    T(
        "internlm",
        "Let me see.<|action_start|><|plugin|>\n"
        '{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>\n',
        (PARIS,),
        "Let me see.",
    ),
    T(
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_time", "parameters": {}}',
        (PARIS, TIME),
    ),
    T(
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", '
        '"parameters": {"city": "Paris"}}',
        (PARIS,),
    ),
    T("llama3_json", '{"answer": 42}', (), '{"answer": 42}'),
    T("llama4_json", 'Hello {"name": "get_time"}', (), 'Hello {"name": "get_time"}'),
    T(
        "minimax",
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '{"name": "get_time", "arguments": {}}\n</tool_calls>',
        (PARIS, TIME),
    ),
    T(
        "gigachat3",
        "Let me see.<|message_sep|>\n\nfunction call<|role_sep|>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris"}}',
        (PARIS,),
        "Let me see.",
    ),
    T(
        "phi4_mini_json",
        'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        (PARIS,),
    ),
    T(
        "phi4_mini_json",
        '<|tool_call|>[{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}]'
        "<|/tool_call|>",
        (PARIS,),
    ),
    T(
        "jamba",
        '<tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Paris"}},\n'
        '    {"name": "get_time", "arguments": {}}\n]</tool_calls>',
        (PARIS, TIME),
    ),
    T(
        "hunyuan_a13b",
        "<think>\nThe weather.\n</think>\n<answer>\nOne moment.\n"
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>'
        "\n</answer>",
        (PARIS,),
        "One moment.",
        "The weather.",
        "hunyuan_a13b",
    ),
    T(
        "nemotron_json",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>',
        (PARIS,),
    ),
    T("xlam", '[{"name": "get_weather", "arguments": {"city": "Paris"}}]', (PARIS,)),
    T("xlam", 'Here:\n```json\n[{"name": "get_time", "arguments": {}}]\n```', (TIME,), "Here:"),
    T(
        "cohere_command3",
        "<|START_THINKING|>I need the weather.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}\n'
        "]<|END_ACTION|>",
        (PARIS,),
        reasoning="I need the weather.",
        thinks="cohere_command3",
    ),
    T(
        "cohere_command3",
        "It is sunny.<|END_RESPONSE|>",
        (),
        "It is sunny.",
        thinks="cohere_command3",
    ),
    T(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"},'
        ' {"name": "get_time", "arguments": {}, "id": "a1b2c3d4f"}]',
        (PARIS, TIME),
    ),
    T("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', (PARIS,)),
    T(
        "mistral_args",
        'Let me see.[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}'
        '[TOOL_CALLS]get_weather{"city": "Rome", "days": 3}',
        (PARIS, ROME),
        "Let me see.",
    ),
    T(
        "mistral_args",
        '[THINK]Paris.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
        (PARIS,),
        reasoning="Paris.",
        thinks="mistral",
    ),
    T(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        (PARIS, TIME),
    ),
    T(
        "deepseek_v31",
        "Paris.</think>Let me see.<｜tool▁calls▁begin｜>"
        "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>'
        '{"city": "Rome", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        (PARIS, ROME),
        "Let me see.",
        "Paris.",
        "deepseek_v31",
        True,
    ),
    T(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        (PARIS, TIME),
    ),
    T(
        "kimi_k2",
        "I forget to close.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        (PARIS,),
        reasoning="I forget to close.",
        thinks="kimi_k2",
        starts_inside=True,
    ),
    T("json", '[{"name": "get_weather", "parameters": {"city": "Paris"}}]', (PARIS,)),
    T(
        "openai",
        "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>',
        (PARIS,),
        reasoning="I need the weather.",
        thinks="openai_gptoss",
    ),
    T(
        "openai",
        "<|channel|>commentary<|message|>One moment.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Paris"}<|call|>',
        (PARIS,),
        "One moment.",
        thinks="openai_gptoss",
    ),
    T(
        "openai",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is sunny.<|return|>",
        (),
        "It is sunny.",
        "Easy.",
        "openai_gptoss",
    ),
)
QWEN_CALL = (
    "<tool_call>\n<function=search>\n<parameter=query>\nline 1\n\nline <b> 3\n</parameter>\n"
    '<parameter=filters>\n{"a": [1, 2], "b": null}\n</parameter>\n'
    "<parameter=tags>\n['x', 'y']\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
    "<parameter=limit>\nnull\n</parameter>\n<parameter=score>\n2.50\n</parameter>\n"
    "</function>\n</tool_call>"
)
QWEN_ARGUMENTS = {
    "query": "line 1\n\nline <b> 3",
    "filters": {"a": [1, 2], "b": None},
    "tags": ["x", "y"],
    "exact": True,
    "limit": None,
    "score": 2.5,
}
NS = "]<]minimax[>["
M3_CALL = (
    f'{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<city>Rome{NS}</city>'
    f'{NS}<days>3{NS}</days>{NS}</invoke>\n{NS}<invoke name="search">\n'
    f"{NS}<query>a <b> ] c{NS}</query>{NS}<filters>{NS}<place>{NS}<x>1.5{NS}</x>{NS}</place>"
    f"{NS}<tag>a{NS}</tag>{NS}<tag>b{NS}</tag>{NS}</filters>"
    f"{NS}<tags>{NS}<item>x{NS}</item>{NS}<item>7{NS}</item>{NS}</tags>"
    f"{NS}<exact>true{NS}</exact>{NS}<limit>null{NS}</limit>{NS}<other>{NS}</other>\n"
    f'{NS}</invoke>\n{NS}<invoke name="get_time">{NS}</invoke>\n{NS}</tool_call>'
)
M3_ARGUMENTS = {
    "query": "a <b> ] c",
    "filters": {"place": {"x": 1.5}, "tag": ["a", "b"]},
    "tags": ["x", "7"],
    "exact": True,
    "limit": None,
    "other": "",
}
TAGGED_ROWS = (
    T("qwen3_coder", QWEN_CALL, (("search", QWEN_ARGUMENTS),)),
    T(
        "qwen3_xml",
        "Let me see.\n\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        (TIME, ROME),
        "Let me see.",
    ),
    T(
        "step3p5",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=units>\n12\n</parameter>\n<parameter=other>\n12\n</parameter>\n"
        "</function>\n</tool_call>",
        (("get_weather", {"city": "12", "units": "12", "other": 12}),),
    ),
    T(
        "seed_oss",
        "<seed:think>Paris.</seed:think><seed:tool_call>\n<function=get_weather>\n"
        "<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        (PARIS,),
        reasoning="Paris.",
        thinks="seed_oss",
    ),
    T(
        "deepseek_v32",
        "Paris and Rome.</think>\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        (PARIS, ROME),
        reasoning="Paris and Rome.",
        thinks="deepseek_v32",
        starts_inside=True,
    ),
    T(
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        (TIME,),
    ),
    T(
        "deepseek_v41",
        "Paris.</think>Let me check.\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Rome</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
        '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="get_time">\n\n</｜DSML｜ invoke>\n'
        "</｜DSML｜ calls>",
        (ROME, TIME),
        "Let me check.",
        "Paris.",
        "deepseek_v41",
        True,
    ),
    T(
        "hy_v3",
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
        "<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n<tool_call>get_time<tool_sep>\n</tool_call>\n</tool_calls>",
        (ROME, TIME),
    ),
    T(
        "hy_v4",
        "Rome.</think>sure!<tool_calls><tool_call>get_weather<arg_key>city</arg_key>"
        "<arg_value>Rome</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
        "<tool_call>get_time</tool_call></tool_calls>",
        (ROME, TIME),
        "sure!",
        "Rome.",
        "hy_v4",
        True,
    ),
    T(
        "kimi_k3",
        "Rome.<|close|>think<|sep|><|open|>response<|sep|>Let me look.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="get_time" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        (ROME, TIME),
        "Let me look.",
        "Rome.",
        "kimi_k3",
        True,
    ),
    T(
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="search" index="1"<|sep|>'
        '<|open|>argument key="query" type="string"<|sep|>a < b &amp;\n<|x|>'
        "<|close|>argument<|sep|>"
        '<|open|>argument key="a &quot;&amp;amp;&quot;" type="null"<|sep|>null'
        "<|close|>argument<|sep|>"
        '<|open|>argument key="filters" type="object"<|sep|>{"a":[1]}<|close|>argument<|sep|>'
        '<|open|>argument key="tags" type="array"<|sep|>["x"]<|close|>argument<|sep|>'
        '<|open|>argument key="exact" type="boolean"<|sep|>true<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        (
            (
                "search",
                {
                    "query": "a < b &amp;\n<|x|>",
                    'a "&amp;"': None,
                    "filters": {"a": [1]},
                    "tags": ["x"],
                    "exact": True,
                },
            ),
        ),
    ),
    T(
        "kimi_k3",
        "Hello<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
        (),
        "Hello",
        thinks="kimi_k3",
    ),
    T(
        "glm45",
        "<think>Rome.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n<tool_call>get_time\n</tool_call>",
        (ROME, TIME),
        reasoning="Rome.",
        thinks="glm45",
    ),
    T(
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
        "<tool_call>get_time</tool_call>",
        (PARIS, TIME),
    ),
    T(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>'
        '\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n'
        "</minimax:tool_call>",
        (ROME, TIME),
    ),
    T(
        "minimax_m3",
        "<mm:think>Rome.</mm:think>I will look.\n" + M3_CALL,
        (ROME, ("search", M3_ARGUMENTS), TIME),
        "I will look.",
        "Rome.",
        "minimax_m3",
    ),
    T(
        "dots",
        '<dots_function_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Paris</parameter>\n</invoke>\n</dots_function_call>',
        (PARIS,),
    ),
    T(
        "minicpm5",
        'Let me see.\n<function name="get_weather"><param name="city">Rome</param>'
        '<param name="days">3</param></function>\n<function name="get_time"></function>',
        (ROME, TIME),
        "Let me see.",
    ),
    T(
        "step3",
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get_weather"><steptml:parameter name="city">Paris'
        "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
        (PARIS,),
    ),
    T(
        "gemma4",
        "<|channel>thought\nRome.\n<channel|>"
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:search{filters:{a:[1,-2.5],b:{}},exact:true,limit:null,"
        'query:<|"|>say "hi", {x}<|"|>,tags:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|>'
        "<|tool_call>call:get_time{}<tool_call|>",
        (
            ROME,
            (
                "search",
                {
                    "filters": {"a": [1, -2.5], "b": {}},
                    "exact": True,
                    "limit": None,
                    "query": 'say "hi", {x}',
                    "tags": ["a", "b"],
                },
            ),
            TIME,
        ),
        reasoning="Rome.",
        thinks="gemma4",
    ),
    T(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        (PARIS,),
    ),
)
PYTHON_ROWS = (
    T("pythonic", '[get_weather(city="Rome", days=3), get_time()]', (ROME, TIME)),
    T(
        "pythonic",
        "[search(query='it\\'s \"so\"\\n\\u00e9', filters={'a': [1, 2.5, None], 'b': {}}, "
        'tags=("x", "y",), exact=False, limit=1_000)]',
        (
            (
                "search",
                {
                    "query": 'it\'s "so"\né',
                    "filters": {"a": [1, 2.5, None], "b": {}},
                    "tags": ["x", "y"],
                    "exact": False,
                    "limit": 1000,
                },
            ),
        ),
    ),
    T("pythonic", "[1, 2] is a list.", (), "[1, 2] is a list."),
    T(
        "llama4_pythonic",
        '<|python_start|>[get_weather(city="Paris")]<|python_end|>',
        (PARIS,),
    ),
    T(
        "olmo3",
        '<function_calls>\nget_weather(city="Rome", days=3)\nget_time()\n</function_calls>',
        (ROME, TIME),
    ),
    T(
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Checking.',
        (PARIS,),
        "Checking.",
    ),
)
THOUGHTS = (
    T("", "Hm.\n</think>\n\nHello.", (), "Hello.", "Hm.", "deepseek_r1", True),
    T("", "<think>\nHm.\n</think>\n\nHello.", (), "Hello.", "Hm.", "deepseek_r1", True),
    T("", "Hello </think> there.", (), "Hello </think> there.", "", "deepseek_r1"),
    T("", "Hm.", (), "", "Hm.", "qwen3", True),
    T(
        "",
        "<think>Hm.</think><response>\nHello.\n</response>\n",
        (),
        "Hello.",
        "Hm.",
        "ernie45",
    ),
    T("", "<longcat_think>Hm.</longcat_think>Hello.", (), "Hello.", "Hm.", "longcat"),
    T(
        "",
        "Here is my thought process:\nHm.\nHere is my response:\nHello.",
        (),
        "Hello.",
        "Hm.",
        "granite",
    ),
    T(
        "hermes",
        "<think>I could write <tool_call> here.</think>Hello.",
        (),
        "Hello.",
        "I could write <tool_call> here.",
        "qwen3",
        unparsed=1,
    ),
)
TRANSCRIPTS = (*JSON_ROWS, *TAGGED_ROWS, *PYTHON_ROWS, *THOUGHTS)


def joined(events: Iterable[Event]) -> list[Event]:
    """Events with the texts of neighbours joined."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if last is not None and event.text and last[0::2] == event[0::2] and last.text:
            result[-1] = last._replace(text=last.text + event.text)
        else:
            result.append(event)
    return result
