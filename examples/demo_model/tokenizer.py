"""The demo model's tokenizer: byte-level BPE made from the training text, and its chat template."""

import itertools
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from demo_model.conversation import Conversation
from demo_model.corpus import conversations

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 2048
CONTEXT = 2048

# ChatML. Tools stand in the system turn, one JSON object a line; calls are written the Hermes way,
# as text and not as special tokens, so that a decoder that drops special tokens keeps them.
CHAT_TEMPLATE = """\
{%- set start = '<|im_start|>' -%}
{%- set end = '<|im_end|>\\n' -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if has_system or tools -%}
  {{- start + 'system\\n' -}}
  {%- if has_system -%}
    {{- messages[0].content -}}
  {%- endif -%}
  {%- if tools -%}
    {%- if has_system -%}
      {{- '\\n\\n' -}}
    {%- endif -%}
    {{- 'Tools:\\n<tools>\\n' -}}
    {%- for tool in tools -%}
      {{- (tool.function if tool.function is defined else tool) | tojson + '\\n' -}}
    {%- endfor -%}
    {{- '</tools>\\nCall one as ' -}}
    {{- '<tool_call>\\\\n{"name": ..., "arguments": {...}}\\\\n</tool_call>' -}}
  {%- endif -%}
  {{- end -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}
      {{- start + 'user' -}}
    {%- endif -%}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}
      {{- end -}}
    {%- endif -%}
  {%- elif message.role != 'system' or not loop.first -%}
    {{- start + message.role + '\\n' -}}
    {%- if message.content -%}
      {{- message.content -}}
    {%- endif -%}
    {%- if message.tool_calls is defined and message.tool_calls -%}
      {%- for call in message.tool_calls -%}
        {%- if not loop.first or message.content -%}
          {{- '\\n' -}}
        {%- endif -%}
        {%- set function = call.function if call.function is defined else call -%}
        {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
        {%- if function.arguments is string -%}
          {{- function.arguments -}}
        {%- else -%}
          {{- function.arguments | tojson -}}
        {%- endif -%}
        {{- '}\\n</tool_call>' -}}
      {%- endfor -%}
    {%- endif -%}
    {{- end -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- start + 'assistant\\n' -}}
{%- endif -%}
"""


def render(tokenizer: Any, conversation: Conversation, *, to_answer: bool = False) -> str:
    """The conversation as the model reads it, through the chat template and nothing else."""
    messages, tools = conversation
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=to_answer
    )
    return str(text)


def _wrap(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    make: Any = PreTrainedTokenizerFast  # transformers leaves its constructor without types
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START],
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    return tokenizer


def train_tokenizer(seed: int, count: int = 20_000) -> PreTrainedTokenizerFast:
    """Digits stay single, so that a sum is written digit by digit; all 256 bytes have a token."""
    specials = [END_OF_TEXT, TURN_START, TURN_END]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    drafts = _wrap(bpe)  # renders the very text that the model will read
    texts = (
        render(drafts, c).replace(TURN_START, "").replace(TURN_END, "")
        for c in itertools.islice(conversations(seed), count)
    )
    bpe.train_from_iterator(texts, trainer)
    return _wrap(bpe)
