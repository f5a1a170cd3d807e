"""The shapes of vLLM's answers (0.32) as JSON schemas: which keys there are, and of which types.

``MORE`` lists what Rayfin adds. Keys are required where vLLM always sends them, null or not; a
stream leaves out what nothing sets.
"""

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}
ANY: Schema = {}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def each(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def record(always: Mapping[str, Schema], sometimes: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "properties": {**always, **(sometimes or {})},
        "required": list(always),
        "additionalProperties": False,
    }


IDS = each(WHOLE)
SCORE = record({"logprob": NUMBER, "rank": or_null(WHOLE), "decoded_token": or_null(TEXT)})
PROMPT_SCORES = each(or_null({"type": "object", "additionalProperties": SCORE}))
STOP: Schema = {"type": ["integer", "string", "null"]}
TIMES = (
    *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms"),
    *("mean_itl_ms", "tokens_per_second"),
)
METRICS = record({**{name: or_null(NUMBER) for name in TIMES}, "speculative_decoding": NULL})
SENT_METRICS = record({}, dict.fromkeys(TIMES, NUMBER))

PROMPT_DETAILS = record(
    {
        "cached_tokens": or_null(WHOLE),
        "created_cache_tokens": or_null(WHOLE),
        "multimodal_tokens": or_null({"type": "object"}),
    }
)
DETAILS = record({"reasoning_tokens": WHOLE})
COUNTS = {"prompt_tokens": WHOLE, "total_tokens": WHOLE, "completion_tokens": WHOLE}
USAGE = record(
    {
        **COUNTS,
        "prompt_tokens_details": or_null(PROMPT_DETAILS),
        "completion_tokens_details": or_null(DETAILS),
    }
)
LAST_USAGE = record(
    COUNTS,
    {
        "prompt_tokens_details": record({"cached_tokens": WHOLE, "created_cache_tokens": WHOLE}),
        "completion_tokens_details": DETAILS,
    },
)

# Log probabilities; "refusal" is OpenAI's.
TOP = {"token": TEXT, "logprob": NUMBER, "bytes": or_null(IDS)}
CHAT_LOGPROBS = record(
    {"content": or_null(each(record({**TOP, "top_logprobs": each(record(TOP))})))},
    {"refusal": NULL},
)
TEXT_LOGPROBS = record(
    {
        "text_offset": IDS,
        "token_logprobs": each(or_null(NUMBER)),
        "tokens": each(TEXT),
        "top_logprobs": each(or_null({"type": "object", "additionalProperties": NUMBER})),
    }
)

# Whole answers
REPLY = {
    "id": TEXT,
    "created": WHOLE,
    "model": TEXT,
    "service_tier": or_null(TEXT),
    "system_fingerprint": or_null(TEXT),
    "usage": USAGE,
    "kv_transfer_params": or_null({"type": "object"}),
    "ec_transfer_params": or_null({"type": "object"}),
    "metrics": or_null(METRICS),
}
END = {"finish_reason": or_null(TEXT), "stop_reason": STOP}
CALL = record(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": record({"name": TEXT, "arguments": TEXT}),
    }
)
MESSAGE = record(
    {
        "role": TEXT,
        "content": or_null(TEXT),
        "refusal": or_null(TEXT),
        "annotations": NULL,
        "audio": NULL,
        "function_call": NULL,
        "reasoning": or_null(TEXT),
    },
    {"tool_calls": {**each(CALL), "minItems": 1}, "reasoning_content": TEXT},
)
CHAT = record(
    {
        **REPLY,
        "object": {"const": "chat.completion"},
        "choices": each(
            record(
                {
                    "index": WHOLE,
                    "message": MESSAGE,
                    "logprobs": or_null(CHAT_LOGPROBS),
                    **END,
                    "token_ids": or_null(IDS),
                    "routed_experts": or_null(TEXT),
                }
            )
        ),
        "prompt_logprobs": or_null(PROMPT_SCORES),
        "prompt_token_ids": or_null(IDS),
        "prompt_text": or_null(TEXT),
    }
)
COMPLETION = record(
    {
        **REPLY,
        "object": {"const": "text_completion"},
        "choices": each(
            record(
                {
                    "index": WHOLE,
                    "text": TEXT,
                    "logprobs": or_null(TEXT_LOGPROBS),
                    **END,
                    "token_ids": or_null(IDS),
                    "prompt_logprobs": or_null(PROMPT_SCORES),
                    "prompt_token_ids": or_null(IDS),
                    "routed_experts": or_null(TEXT),
                }
            )
        ),
    }
)

SCORES = record(
    {
        "id": TEXT,
        "object": {"const": "list"},
        "created": WHOLE,
        "model": TEXT,
        "data": each(record({"index": WHOLE, "object": {"const": "score"}, "score": NUMBER})),
        "usage": USAGE,
    }
)

# Chunks: "continuous" is the usage of continuous_usage_stats.
CALL_PIECE = record(
    {"index": WHOLE, "function": record({"arguments": TEXT}, {"name": TEXT})},
    {"id": TEXT, "type": {"const": "function"}},
)
DELTA = record(
    {},
    {
        "role": TEXT,
        "content": TEXT,
        "reasoning": TEXT,
        "reasoning_content": TEXT,
        "tool_calls": each(CALL_PIECE),
    },
)
FRAME = {"id": TEXT, "created": WHOLE, "model": TEXT}


def chunk(kind: str, choice: Schema, first: Mapping[str, Schema], continuous: bool) -> Schema:
    details = {"completion_tokens_details": or_null(DETAILS)} if "chat" in kind else {}
    usage = {"usage": record({**COUNTS, **details})} if continuous else {}
    one = {"type": "array", "prefixItems": [choice], "items": False, "minItems": 1}
    return record({**FRAME, "object": {"const": kind}, "choices": one, **usage, **first})


def chat_chunk(place: str, continuous: bool = False) -> Schema:
    """A chunk at a place: "first" with the role, "middle", or "last" of its choice."""
    choice = {"index": WHOLE, "delta": DELTA, "logprobs": or_null(CHAT_LOGPROBS)}
    first: dict[str, Schema] = {}
    if place == "first":
        first = {"prompt_token_ids": or_null(IDS), "prompt_text": or_null(TEXT)}
    choice["finish_reason"] = TEXT if place == "last" else NULL
    choice["token_ids"] = or_null(IDS)
    if place == "last":
        choice["stop_reason"] = STOP
    return chunk("chat.completion.chunk", record(choice), first, continuous)


def text_chunk(continuous: bool = False) -> Schema:
    keys = {"index": WHOLE, "text": TEXT, "logprobs": or_null(TEXT_LOGPROBS), **END}
    choice = record({**keys, "prompt_token_ids": or_null(IDS), "token_ids": or_null(IDS)})
    return chunk("text_completion", choice, {}, continuous)


def usage_chunk(kind: str) -> Schema:
    fields = {**FRAME, "object": {"const": kind}, "choices": {"const": []}, "usage": LAST_USAGE}
    return record(fields, {"metrics": SENT_METRICS})


def check(answer: Any, schema: Schema) -> None:
    """Fails with the path of the first key or value that differs."""
    for error in Draft202012Validator(schema).iter_errors(answer):
        raise AssertionError(f"{error.json_path}: {error.message}")
