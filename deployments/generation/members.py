"""Members of bodies that Rayfin knows and does not serve: one table for all APIs.

A member that changes no token passes, and is named in ``x-rayfin-ignored-fields`` like one that no
table knows. One that would change the answer or its meaning is refused, unless it is empty.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.text.checks import is_empty

Api = Literal["completions", "responses", "messages", "tokenize"]


class Member(NamedTuple):
    """What becomes of a member."""

    refused: bool = True
    harmless: tuple[object, ...] = ()  # values that change nothing, beside empty ones
    instead: str = ""  # what to use in its place


IGNORED, REFUSED = Member(refused=False), Member()
FORM = Member(instead="text.format")
ONE, OFF = Member(harmless=(1,)), Member(harmless=(False,))
ANYWHERE: dict[str, Member] = {
    "prompt_embeds": REFUSED,
    "logprob_token_ids": REFUSED,
    "flat_logprobs": Member(harmless=(False,)),
    "thinking_token_budget": Member(harmless=(-1,)),
    **dict.fromkeys(
        ("return_sampling_mask", "prompt_logprob_token_ids", "prompt_logprob_start"),
        Member(harmless=(False, 0), instead="/inference/v1/generate"),
    ),
    "watermarking": Member(harmless=(False,)),
    "mm_payload": REFUSED,
    "media_io_kwargs": REFUSED,
    "mm_processor_kwargs": REFUSED,
    "chat_template": REFUSED,
    "documents": REFUSED,
    "functions": Member(instead="tools"),
    "function_call": Member(harmless=("none",), instead="tool_choice"),
    "audio": REFUSED,
    "modalities": Member(harmless=(["text"],)),
    "suffix": REFUSED,
    "logits_processors": Member(instead="logit_bias"),
    "web_search_options": REFUSED,
    **dict.fromkeys(
        (
            *("vllm_xargs", "extra_args", "kv_transfer_params", "ec_transfer_params"),
            *("skip_reading_prefix_cache", "routed_experts_prompt_start"),
            *("trace_decode_token_ids", "return_weight_versions", "return_token_offsets"),
        ),
        IGNORED,
    ),
}
NOT_SERVED: dict[Api, dict[str, Member]] = {
    "completions": ANYWHERE
    | {
        "max_output_tokens": Member(instead="max_tokens"),
        "stop_sequences": Member(instead="stop"),
    },
    "responses": ANYWHERE
    | {
        "prompt": REFUSED,
        "context_management": Member(instead="truncation"),
        "moderation": REFUSED,
        "previous_input_messages": Member(instead="input"),
        "truncate_prompt_tokens": Member(instead="truncation"),
        "use_beam_search": OFF,
        "messages": Member(instead="input"),
        **dict.fromkeys(
            ("max_tokens", "max_completion_tokens"), Member(instead="max_output_tokens")
        ),
        "reasoning_effort": Member(instead="reasoning.effort"),
        "response_format": FORM,
        "stop_sequences": Member(instead="stop"),
        "logprobs": Member(harmless=(False,), instead="include"),
        **{"n": ONE, "best_of": ONE, "echo": OFF},
        **dict.fromkeys(("allowed_token_ids", "bad_words", "prompt_logprobs"), REFUSED),
        **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex"), FORM),
        **dict.fromkeys(("guided_choice", "guided_grammar", "guided_whitespace_pattern"), FORM),
    },
    "messages": {
        "thread": REFUSED,  # in Anthropic's own words
        "max_completion_tokens": Member(instead="max_tokens"),
        "max_output_tokens": Member(instead="max_tokens"),
        "reasoning_effort": Member(instead="output_config.effort"),
        "response_format": Member(instead="output_config.format"),
        "stop": Member(instead="stop_sequences"),
        "n": ONE,
        **dict.fromkeys(("container", "context_management", "mcp_servers"), IGNORED),
    },
    "tokenize": {"media_io_kwargs": REFUSED, "mm_processor_kwargs": REFUSED},
}
"""By API and name. A body that declares a member of its own does not come here with it."""


def check_members(api: Api, extra: Mapping[str, Any] | None) -> None:
    """Refuses what is not served.

    Args:
        extra: members that the body does not declare.

    Raises:
        InvalidRequest: ``param`` is the member.
    """
    for name, value in (extra or {}).items():
        member = NOT_SERVED[api].get(name, IGNORED)
        if member.refused and not is_empty(value) and value not in member.harmless:
            raise unserved(name, member.instead)


def ignored_members(api: Api, extra: Mapping[str, Any] | None) -> list[str]:
    """Returns the names of members without effect."""
    known = NOT_SERVED[api]
    return [name for name in extra or {} if not known.get(name, IGNORED).refused]


def unserved(name: str, instead: str = "", which: str = "") -> InvalidRequest:
    use = f" Use {instead}." if instead else ""
    return InvalidRequest(
        f"{name} {which}is not supported by this version of Rayfin.{use}",
        name,
        "unsupported_parameter",
    )
