"""Chat templates in the shape of public models' ones: their marks and turns, with our sentences.

Each says which rows it must be found to be.
"""

from typing import NamedTuple


class Case(NamedTuple):
    """A template, the vocabulary's marks, and what it is."""

    template: str
    tokens: tuple[str, ...]
    tools: str | None
    reasoning: str | None = None
    as_text: bool = False  # arguments must be given as text
    inside: bool = False  # an answer starts within a thought


CHATML = ("<|im_start|>", "<|im_end|>")
_SYSTEM = """
{%- if tools %}
  {{- '<|im_start|>system\\nFunctions:\\n' }}
  {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
"""


def chatml(assistant: str, generation: str = "", system: str = _SYSTEM) -> str:
    """Turns of ChatML; ``assistant`` writes an answer's inside."""
    return (
        system
        + """
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {{- '<|im_start|>assistant\\n' }}"""
        + assistant
        + """{{- '<|im_end|>\\n' }}
  {%- elif message.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
    {{- '\\n</tool_response><|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"""
        + generation
        + "{%- endif %}"
    )


def calls(
    one: str, *, before: str = "", between: str = "", after: str = "", content: bool = True
) -> str:
    """The inside of an answer: content, then each call by ``one``, which has ``f`` and ``call``."""
    said = "{%- if message.content %}{{- message.content }}{%- endif %}" if content else ""
    return (
        said
        + "{%- if message.tool_calls %}"
        + before
        + "{%- for call in message.tool_calls %}{%- set f = call.function %}"
        + (f"{{%- if not loop.first %}}{between}{{%- endif %}}" if between else "")
        + one
        + "{%- endfor %}"
        + after
        + "{%- endif %}"
    )


def text(words: str) -> str:
    """A Jinja expression of plain text."""
    return "{{- '" + words.replace("'", "\\'").replace("\n", "\\n") + "' }}"


_HERMES = (
    text('<tool_call>\n{"name": "')
    + "{{- f.name }}"
    + text('", "arguments": ')
    + "{{- f.arguments if f.arguments is string else f.arguments | tojson }}"
    + text("}\n</tool_call>")
)
_LAST_THOUGHT = """
{%- set content = message.content or '' %}{%- set thought = message.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
  {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
  {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
"""
_PARAMETERS = (
    "{%- for key, value in f.arguments | items %}"
    "{{- 'OPEN' + key + 'MIDDLE' }}"
    "{{- value if value is string else value | tojson }}{{- 'CLOSE' }}"
    "{%- endfor %}"
)


def parameters(opening: str, middle: str, close: str) -> str:
    """Each argument between tags."""
    words = _PARAMETERS.replace("OPEN", opening).replace("MIDDLE", middle)
    return words.replace("CLOSE", close).replace("\n", "\\n")


LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")


def llama(assistant: str, turn: str = "<|start_header_id|>ROLE<|end_header_id|>\\n\\n") -> str:
    """Turns of Llama 3; another ``turn`` is another generation's."""
    end = "<|eot|>" if "header_start" in turn else "<|eot_id|>"
    opening = turn.replace("ROLE", "' + message.role + '")
    return (
        "{{- '<|begin_of_text|>' }}{%- if tools %}"
        + text(turn.replace("ROLE", "system").replace("\\n", "\n"))
        + "{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}"
        + text(end)
        + "{%- endif %}{%- for message in messages %}{%- if message.tool_calls %}"
        + text(turn.replace("ROLE", "assistant").replace("\\n", "\n"))
        + assistant
        + text(end)
        + "{%- else %}{{- '"
        + opening
        + "' + message.content + '"
        + end
        + "' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
        + text(turn.replace("ROLE", "assistant").replace("\\n", "\n"))
        + "{%- endif %}"
    )


_ONE_CALL_ONLY = (
    "{%- if message.tool_calls | length != 1 %}"
    "{{- raise_exception('One call at a time.') }}{%- endif %}"
)
_LLAMA_JSON = (
    "{%- set f = message.tool_calls[0].function %}"
    + _ONE_CALL_ONLY
    + text('{"name": "')
    + "{{- f.name }}"
    + text('", "parameters": ')
    + "{{- f.arguments | tojson }}"
    + text("}")
)
_PYTHON = (
    "{{- f.name + '(' }}{%- for key, value in f.arguments | items %}"
    "{{- key + '=' }}{{- value | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}"
    "{%- endfor %}{{- ')' }}"
)

MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
_MISTRAL = """
{{- '<s>' }}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {%- if tools and loop.last or tools and loop.first %}
      {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST]' + message.content + '[/INST]' }}
  {%- elif message.role == 'assistant' %}
    {%- if message.tool_calls %}CALLS{%- else %}{{- message.content }}{%- endif %}
    {{- '</s>' }}
  {%- endif %}
{%- endfor %}
"""
_NINE = (
    "{%- if call.id is not defined or call.id | length != 9 %}"
    "{{- raise_exception('Ids have nine characters.') }}{%- endif %}"
)
_OLD_MISTRAL = (
    text("[TOOL_CALLS][")
    + "{%- for call in message.tool_calls %}"
    + _NINE
    + "{%- set f = call.function | tojson %}{{- f[:-1] }}{{- ', \"id\": \"' + call.id + '\"}' }}"
    + "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}"
)
_NEW_MISTRAL = (
    "{%- for call in message.tool_calls %}{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}"
    "{{- call.function.arguments | tojson }}{%- endfor %}"
)

DEEPSEEK = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)


def deepseek(assistant: str, generation: str = "") -> str:
    """Turns without line breaks."""
    return (
        "{%- if tools %}{{- 'Functions: ' + tools | tojson + '\\n' }}{%- endif %}"
        "{%- for message in messages %}{%- if message.role == 'user' %}"
        "{{- '<｜User｜>' + message.content }}{%- elif message.role == 'assistant' %}"
        "{{- '<｜Assistant｜>' }}" + assistant + "{{- '<｜end▁of▁sentence｜>' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}"
        + generation
        + "{%- endif %}"
    )


_CUT = (
    "{%- set said = message.content or '' %}{%- if '</think>' in said %}"
    "{%- set said = said.split('</think>')[-1] %}{%- endif %}{{- said }}"
)
_V3 = calls(
    text("<｜tool▁call▁begin｜>function<｜tool▁sep｜>")
    + "{{- f.name + '\\n```json\\n' }}{{- f.arguments | tojson }}"
    + text("\n```<｜tool▁call▁end｜>"),
    before=text("<｜tool▁calls▁begin｜>"),
    between=text("\n"),
    after=text("<｜tool▁calls▁end｜>"),
    content=False,
)
_V31 = calls(
    text("<｜tool▁call▁begin｜>")
    + "{{- f.name }}"
    + text("<｜tool▁sep｜>")
    + "{{- f.arguments | tojson }}"
    + text("<｜tool▁call▁end｜>"),
    before=text("<｜tool▁calls▁begin｜>"),
    after=text("<｜tool▁calls▁end｜>"),
    content=False,
)
_V32 = calls(
    text('<｜DSML｜invoke name="')
    + "{{- f.name }}"
    + text('">\n')
    + "{%- for key, value in f.arguments | items %}"
    + "{{- '<｜DSML｜parameter name=\"' + key + '\" string=\"' }}"
    + "{{- 'true' if value is string else 'false' }}{{- '\">' }}"
    + "{{- value if value is string else value | tojson }}"
    + text("</｜DSML｜parameter>\n")
    + "{%- endfor %}"
    + text("</｜DSML｜invoke>\n"),
    before=text("\n\n<｜DSML｜function_calls>\n"),
    after=text("</｜DSML｜function_calls>"),
    content=False,
)

_KIMI = """
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}{{- '<|im_assistant|>assistant<|im_middle|>' }}
  {%- else %}{{- '<|im_user|>user<|im_middle|>' }}{%- endif %}
  {{- message.content or '' }}
  {%- if message.tool_calls %}
    {{- '<|tool_calls_section_begin|>' }}
    {%- for call in message.tool_calls %}
      {{- '<|tool_call_begin|>functions.' + call.function.name + ':' + loop.index0 | string }}
      {{- '<|tool_call_argument_begin|>' }}
      {%- if call.function.arguments is string %}{{- call.function.arguments }}
      {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
      {{- '<|tool_call_end|>' }}
    {%- endfor %}
    {{- '<|tool_calls_section_end|>' }}
  {%- endif %}
  {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""
KIMI = (
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)

HARMONY = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    "<|return|>",
)
_HARMONY = """
{%- if tools %}{{- '<|start|>developer<|message|>' }}
  {%- for tool in tools %}{{- 'type ' + tool.function.name + ';\\n' }}{%- endfor %}
  {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' and message.tool_calls %}
    {%- if message.thinking %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
    {%- endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- call.arguments + '<|call|>' }}
  {%- elif message.role == 'assistant' %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
  {%- else %}
    {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

_GLM = """
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\nFunctions ' }}
  {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{{- '<|user|>\\n' + message.content }}
  {%- elif message.role == 'assistant' %}
    {{- '<|assistant|>' }}
    {%- if message.reasoning_content %}{{- '\\n<think>' + message.reasoning_content + '</think>' }}
    {%- else %}{{- '\\n<think></think>' }}{%- endif %}
    {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
      {{- 'BREAK<tool_call>' + call.function.name }}
      {%- for key, value in call.function.arguments | items %}
        {{- 'BREAK<arg_key>' + key + '</arg_key>BREAK<arg_value>' }}
        {{- value if value is string else value | tojson }}{{- '</arg_value>' }}
      {%- endfor %}
      {{- 'BREAK</tool_call>' }}
    {%- endfor %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}
  {%- if enable_thinking is defined and not enable_thinking %}
    {{- '\\n<think></think>' }}{%- endif %}
{%- endif %}
"""
GLM = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)

_KIMI3 = """
{%- macro attribute(value) %}{{- value | string | replace('&', '&amp;') | replace('"', '&quot;') }}
{%- endmacro %}
{%- macro kind(value) %}
  {%- if value is boolean %}boolean{% elif value is none %}null{% elif value is number %}number
  {%- elif value is string %}string{% elif value is mapping %}object{% else %}array{% endif %}
{%- endmacro %}
{%- set thinking = thinking | default(true) %}
{%- if tools %}{{- '<|open|>message role="system"<|sep|>' + tools | tojson }}
  {{- '<|close|>message<|sep|><|end_of_msg|>' }}
{%- endif %}
{%- for message in messages %}
  {{- '<|open|>message role="' + message.role + '"<|sep|>' }}
  {%- if message.role != 'assistant' %}{{- message.content }}
  {%- else %}
    {%- if thinking %}
      {{- '<|open|>think<|sep|>' + (message.reasoning or '') + '<|close|>think<|sep|>' }}
    {%- endif %}
    {{- '<|open|>response<|sep|>' + (message.content or '') + '<|close|>response<|sep|>' }}
    {%- if message.tool_calls %}
      {{- '<|open|>tools<|sep|>' }}
      {%- for call in message.tool_calls %}
        {{- '<|open|>call tool="' + attribute(call.function.name) + '" index="' }}
        {{- loop.index | string + '"<|sep|>' }}
        {%- for key, value in call.function.arguments | items %}
          {{- '<|open|>argument key="' + attribute(key) + '" type="' + kind(value) + '"<|sep|>' }}
          {{- value if value is string else value | tojson }}{{- '<|close|>argument<|sep|>' }}
        {%- endfor %}
        {{- '<|close|>call<|sep|>' }}
      {%- endfor %}
      {{- '<|close|>tools<|sep|>' }}
    {%- endif %}
  {%- endif %}
  {{- '<|close|>message<|sep|><|end_of_msg|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|open|>message role="assistant"<|sep|><|open|>' + ('think' if thinking else 'response') }}
  {{- '<|sep|>' }}
{%- endif %}
"""
KIMI3 = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

_HY = """
{%- set z = ':opensource' %}{%- set effort = reasoning_effort | default('high') %}
{{- '<|hy_begin|>' }}
{%- if tools %}{{- tools | tojson + '<|hy_sys|>' }}{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}{{- '<|hy_assistant|>' }}
    {%- if effort != 'no_think' %}{{- '<think' + z + '>' + (message.reasoning_content or '') }}
      {{- '</think' + z + '>' }}{%- endif %}
    {{- message.content or '' }}
    {%- if message.tool_calls %}
      {{- '<tool_calls' + z + '>BREAK' }}
      {%- for call in message.tool_calls %}
        {{- '<tool_call' + z + '>' + call.function.name + SEPARATOR }}
        {%- for key, value in call.function.arguments | items %}
          {{- '<arg_key' + z + '>' + key + '</arg_key' + z + '>BREAK<arg_value' + z + '>' }}
          {{- value if value is string else value | tojson }}{{- '</arg_value' + z + '>BREAK' }}
        {%- endfor %}
        {{- '</tool_call' + z + '>BREAK' }}
      {%- endfor %}
      {{- '</tool_calls' + z + '>' }}
    {%- endif %}
    {{- '<|hy_eos|>' }}
  {%- else %}{{- '<|hy_user|>' + message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|hy_assistant|>' }}
  {%- if effort != 'no_think' %}{{- '<think' + z + '>' }}{%- endif %}
{%- endif %}
"""
HY = (
    *("<|hy_begin|>", "<|hy_sys|>", "<|hy_user|>", "<|hy_assistant|>", "<|hy_eos|>"),
    *(
        f"<{slash}{tag}:opensource>"
        for tag in ("think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
        for slash in ("", "/")
    ),
)

_MINIMAX = (
    "{%- if tools %}{{- ']~!b[]~b]system\\n' }}{%- for tool in tools %}{{- tool | tojson }}"
    "{%- endfor %}{{- '[e~[\\n' }}{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- ']~b]ai\\n' }}"
    "{%- if message.reasoning_content %}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}"
    + calls(
        text('<invoke name="')
        + "{{- f.name + '\">' }}"
        + parameters('\n<parameter name="', '">', "</parameter>")
        + text("\n</invoke>\n"),
        before=text("\n<minimax:tool_call>\n"),
        after=text("</minimax:tool_call>"),
    )
    + "{{- '[e~[\\n' }}{%- else %}{{- ']~b]user\\n' + message.content + '[e~[\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}"
)
MINIMAX = ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>")

_M3 = """
{%- set ns = ']<]minimax[>[' %}
{%- macro written(value) %}
  {%- if value is mapping %}
    {%- for key, item in value | items %}{{- ns + '<' + key + '>' + written(item) }}
      {{- ns + '</' + key + '>' }}{%- endfor %}
  {%- elif value is iterable and value is not string %}
    {%- for item in value %}{{- ns + '<item>' + written(item) + ns + '</item>' }}{%- endfor %}
  {%- else %}{{- value if value is string else value | tojson }}{%- endif %}
{%- endmacro %}
{%- set mode = thinking_mode | default('adaptive') %}
{%- if tools %}{{- ']~!b[]~b]developer\n' + tools | tojson + '[e~[\n' }}{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}{{- ']~b]ai\n' }}
    {%- if message.reasoning_content %}
      {{- '<mm:think>' + message.reasoning_content + '</mm:think>' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- if message.tool_calls %}
      {{- ns + '<tool_call>\n' }}
      {%- for call in message.tool_calls %}
        {{- ns + '<invoke name="' + call.function.name + '">' }}
        {{- written(call.function.arguments) + ns + '</invoke>\n' }}
      {%- endfor %}
      {{- ns + '</tool_call>' }}
    {%- endif %}
    {{- '[e~[\n' }}
  {%- else %}{{- ']~b]user\n' + message.content + '[e~[\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\n' }}
  {%- if mode == 'enabled' %}{{- '<mm:think>' }}{%- endif %}
  {%- if mode == 'disabled' %}{{- '</mm:think>' }}{%- endif %}
{%- endif %}
"""
M3 = ("]~!b[", "]~b]", "[e~[", "]<]minimax[>[", "<mm:think>", "</mm:think>")

_GEMMA = (
    "{%- macro braced(value) %}{%- if value is string %}{{- '<|\"|>' + value + '<|\"|>' }}"
    "{%- elif value is mapping %}{{- '{' }}{%- for key, item in value | dictsort %}"
    "{{- key + ':' }}{{- braced(item) }}{%- if not loop.last %}{{- ',' }}{%- endif %}"
    "{%- endfor %}{{- '}' }}{%- else %}{{- value | tojson }}{%- endif %}{%- endmacro %}"
    "{{- '<bos>' }}{%- if tools %}{{- '<|turn>system\\n' }}{%- for tool in tools %}"
    "{{- '<|tool>declaration:' + tool.function.name + '<tool|>' }}{%- endfor %}"
    "{{- '<turn|>\\n' }}{%- endif %}{%- for message in messages %}"
    "{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}"
    "{%- if message.reasoning %}{{- '<|channel>thought\\n' + message.reasoning + '<channel|>' }}"
    "{%- endif %}"
    + calls(
        text("<|tool_call>call:") + "{{- f.name }}{{- braced(f.arguments) }}" + text("<tool_call|>")
    )
    + "{{- '<turn|>\\n' }}{%- endfor %}"
    + "{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{%- endif %}"
)
GEMMA = (
    *("<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *('<|"|>', "<|channel>", "<channel|>"),
)

_GRANITE = """
{%- if thinking %}{{- '<|start_of_role|>system<|end_of_role|>Think first. Write thoughts after ' }}
  {{- "'Here is my thought process:' and the answer after 'Here is my response:'." }}
  {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- if tools %}{{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson }}
  {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' }}
  {%- if message.tool_calls %}
    {{- '<|tool_call|>[' }}
    {%- for call in message.tool_calls %}
      {{- '{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments | tojson }}
      {{- '}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
    {%- endfor %}
    {{- ']' }}
  {%- else %}{{- message.content }}{%- endif %}
  {{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
"""
GRANITE = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")

_PHI = """
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {{- '<|user|>' + message.content }}
    {%- if tools and loop.first %}{{- '<|tool|>' + tools | tojson + '<|/tool|>' }}{%- endif %}
    {{- '<|end|>' }}
  {%- else %}
    {{- '<|assistant|>' }}
    {%- if message.tool_calls %}
      {{- '<|tool_call|>[' }}
      {%- for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments + '}' }}
        {%- if not loop.last %}{{- ', ' }}{%- endif %}
      {%- endfor %}
      {{- ']<|/tool_call|>' }}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
PHI = ("<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>")
PHI_CALLS = ("<|tool_call|>", "<|/tool_call|>")

_CODER = (
    text("<tool_call>\n<function=")
    + "{{- f.name + '>\\n' }}"
    + parameters("<parameter=", ">\n", "\n</parameter>\n")
    + text("</function>\n</tool_call>")
)
_SEED = (
    text("<seed:tool_call>\n<function=")
    + "{{- f.name + '>\\n' }}"
    + parameters("<parameter=", ">", "</parameter>\n")
    + text("</function>\n</seed:tool_call>")
)
_QWEN3 = calls(_HERMES, between=text("\n"), content=False)
_OWN = text("<<do ") + "{{- f.name }}" + text(" with ") + "{{- f.arguments | tojson }}" + text(">>")
_OWN_TAGS = (
    text("<action tool='")
    + "{{- f.name }}"
    + text("'>")
    + parameters("<arg n=\\'", "\\'>", "</arg>")
    + text("</action>")
)

CASES: dict[str, Case] = {
    "qwen2.5": Case(
        chatml(calls(_HERMES, between=text("\n"))),
        (*CHATML, "<tool_call>", "</tool_call>"),
        "hermes",
    ),
    "qwen2.5 without tokens": Case(chatml(calls(_HERMES, between=text("\n"))), (), "hermes"),
    "hermes, compact": Case(
        chatml(calls(_HERMES.replace("\\n", "").replace('": ', '":').replace(", ", ","))),
        CHATML,
        "hermes",
    ),
    "qwen3": Case(
        chatml(
            _LAST_THOUGHT + _QWEN3,
            "{%- if enable_thinking is defined and not enable_thinking %}"
            + text("<think>\n\n</think>\n\n")
            + "{%- endif %}",
        ),
        (*CHATML, "<tool_call>", "</tool_call>", "<think>", "</think>"),
        "hermes",
        "think",
    ),
    "qwen3 that thinks": Case(
        chatml(_LAST_THOUGHT + _QWEN3, text("<think>\n")),
        (*CHATML, "<tool_call>", "</tool_call>"),
        "hermes",
        "think",
        inside=True,
    ),
    "qwen3 coder": Case(chatml(calls(_CODER, between=text("\n"))), CHATML, "qwen3_coder"),
    "seed oss": Case(
        chatml(calls(_SEED, between=text("\n"))),
        (*CHATML, "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        "seed_oss",
        "seed_oss",
    ),
    "llama3": Case(llama(_LLAMA_JSON), LLAMA, "llama3_json"),
    "llama4": Case(
        llama(_LLAMA_JSON, "<|header_start|>ROLE<|header_end|>\\n\\n"),
        ("<|header_start|>", "<|header_end|>", "<|eot|>"),
        "llama3_json",
    ),
    "llama, pythonic": Case(
        llama(calls(_PYTHON, before=text("["), between=text(", "), after=text("]"))),
        LLAMA,
        "pythonic",
    ),
    "mistral, old": Case(
        _MISTRAL.replace("CALLS", _OLD_MISTRAL), (*MISTRAL, "[TOOL_CALLS]"), "mistral"
    ),
    "mistral, new": Case(
        _MISTRAL.replace("CALLS", _NEW_MISTRAL),
        (*MISTRAL, "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
        "mistral_args",
        "mistral",
    ),
    "deepseek r1": Case(
        deepseek(_CUT + _V3, text("<think>\n")),
        DEEPSEEK,
        "deepseek_v3",
        "deepseek_r1",
        inside=True,
    ),
    "deepseek v3.1": Case(
        deepseek(
            _CUT + _V31,
            "{%- if thinking %}{{- '<think>' }}{%- else %}{{- '</think>' }}{%- endif %}",
        ),
        DEEPSEEK,
        "deepseek_v31",
        "deepseek_r1",
    ),
    "deepseek v3.2": Case(
        deepseek(_CUT + _V32),
        (*DEEPSEEK, "｜DSML｜"),
        "deepseek_v32",
        "deepseek_r1",
    ),
    "deepseek v4.1": Case(
        deepseek(
            _CUT
            + _V32.replace("function_calls", " calls")
            .replace("｜invoke", "｜ invoke")
            .replace("｜parameter", "｜ parameter")
        ),
        (*DEEPSEEK, "｜DSML｜"),
        "deepseek_v41",
        "deepseek_r1",
    ),
    "kimi k2": Case(_KIMI, KIMI, "kimi_k2"),
    "kimi k3": Case(_KIMI3, KIMI3, "kimi_k3", "kimi_k3", inside=True),
    "hunyuan 3": Case(
        _HY.replace("BREAK", "\\n").replace("SEPARATOR", "'<tool_sep' + z + '>\\n'"),
        HY,
        "hy_v3",
        "hy_v4",
        inside=True,
    ),
    "hunyuan 4": Case(
        _HY.replace("BREAK", "").replace("SEPARATOR", "''"), HY, "hy_v4", "hy_v4", inside=True
    ),
    "gpt-oss": Case(_HARMONY, HARMONY, "openai", "openai_gptoss", as_text=True),
    "glm 4.5": Case(_GLM.replace("BREAK", "\\n"), GLM, "glm45", "think"),
    "glm 4.7": Case(_GLM.replace("BREAK", ""), GLM, "glm47", "think"),
    "minimax m2": Case(_MINIMAX, MINIMAX, "minimax_m2", "think", inside=True),
    "minimax m3": Case(_M3, M3, "minimax_m3", "minimax_m3"),
    "ling 3": Case(
        chatml(
            "{{- '<think>' + (message.reasoning_content or '') + '</think>' }}"
            + calls(
                text("<tool_call>")
                + "{{- f.name }}"
                + parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
                + text("</tool_call>")
            ),
            text("<think>"),
        ),
        GLM,
        "glm47",
        "think",
        inside=True,
    ),
    "gemma 4": Case(_GEMMA, GEMMA, "gemma4", "gemma4"),
    "granite": Case(_GRANITE, GRANITE, "granite", "granite"),
    "phi 4 mini": Case(_PHI, (*PHI, *PHI_CALLS), "phi4_mini_json", as_text=True),
    "lfm2": Case(
        chatml(
            calls(
                _PYTHON,
                before=text("<|tool_call_start|>["),
                between=text(", "),
                after=text("]<|tool_call_end|>"),
            )
        ),
        (*CHATML, "<|tool_call_start|>", "<|tool_call_end|>"),
        "lfm2",
    ),
    "lfm2 without calls": Case(
        chatml("{{- message.content }}"),
        (*CHATML, "<|tool_call_start|>", "<|tool_call_end|>"),
        "lfm2",
    ),
    "olmo3": Case(
        chatml(
            calls(
                _PYTHON,
                before=text("<function_calls>"),
                between=text("\n"),
                after=text("</function_calls>"),
            )
        ),
        CHATML,
        "olmo3",
    ),
    "own marks": Case(chatml(calls(_OWN)), CHATML, "derived"),
    "own tags": Case(chatml(calls(_OWN_TAGS)), CHATML, "derived"),
    "no calls": Case(chatml("{{- message.content }}"), CHATML, None),
    "no tools": Case(chatml("{{- message.content }}", system=""), CHATML, "hermes"),
}
