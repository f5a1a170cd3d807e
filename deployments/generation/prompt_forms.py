"""Prompts in all forms: a text, token ids, or vLLM's dicts of one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayfin.actors.errors import ContextLengthExceeded, InvalidRequest
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.media.part import MediaInput, PromptEmbeds
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.media.embeds_tensor import Tensor
from rayfin.deployments.text.tokenizer import Tokenizer

Side = Literal["left", "right"]

TEXT, IDS, SALT = "prompt", "prompt_token_ids", "cache_salt"
MAX_SALT = 128  # characters
MEDIA = "images or audio"
OR_CUT = ", or set truncate_prompt_tokens"
NOT_IN_SALT = frozenset("@/\\\0")


@dataclass(frozen=True, slots=True)
class WrittenPrompt:
    """One prompt as sent: a text or token ids."""

    param: str  # its path, for errors
    text: str | None = None
    ids: list[int] | None = None
    cache_salt: str | None = None
    shown: str | None = None  # a text beside the ids, for outputs alone
    given: tuple[Any, ...] = ()  # pictures of PIL, or arrays of audio, for ``LLM`` ...
    kind: MediaKind = "image"  # ... which of the two
    images: tuple[MediaInput, ...] = ()  # the same, when the prompt has their tokens
    tensor: Tensor | None = None  # embeddings in place of the ids, for ``LLM``
    embeds: tuple[PromptEmbeds, ...] = ()  # in place of some of the ids

    @property
    def uncut(self) -> str:
        """What it has that cannot be cut, as ``truncated`` takes it."""
        return MEDIA if self.images else "prompt_embeds" if self.embeds else ""


def read_prompts(
    value: object, param: str = "prompt", *, max_prompts: int | None = None, mixed: bool = False
) -> list[WrittenPrompt]:
    """Reads one prompt in any form, or a list of prompts; none is empty.

    Args:
        max_prompts: prompts in a list, at most.
        mixed: one list may hold both texts and token ids.

    Raises:
        InvalidRequest: ``param`` is the path of the invalid value, such as prompt[1].
    """
    if isinstance(value, str | Mapping):
        return [_read(value, param)]
    if not isinstance(value, list | tuple):
        raise _not_a_prompt(param)
    if not value:
        raise InvalidRequest(f"'{param}' must not be empty.", param, "empty_array")
    if isinstance(value[0], int):
        return [_read(value, param)]
    if max_prompts is not None and len(value) > max_prompts:
        raise InvalidRequest(
            f"'{param}' takes at most {max_prompts} prompts, got {len(value)}.",
            param,
            "array_above_max_length",
        )
    prompts = [_read(item, f"{param}[{i}]") for i, item in enumerate(value)]
    for prompt in prompts if not mixed else ():
        if (prompt.text is None) != (prompts[0].text is None):
            raise _not_a_prompt(prompt.param)
    return prompts


def prompt_ids(
    prompt: WrittenPrompt,
    tokenizer: Tokenizer | None,
    max_model_len: int | None = None,
    *,
    add_special_tokens: bool = True,
) -> list[int]:
    """Returns the token ids of a prompt.

    Args:
        tokenizer: None if only token ids are allowed.
        max_model_len: a text that cannot fit is refused before it is tokenized.

    Raises:
        ContextLengthExceeded: the text has too many tokens even if all are the longest.
        InvalidRequest: a text without a tokenizer.
    """
    if prompt.text is None:
        return prompt.ids or []
    if tokenizer is None:
        raise InvalidRequest("a text needs a tokenizer: pass token ids", prompt.param)
    if max_model_len is not None:
        check_length(len(prompt.text), tokenizer, max_model_len, prompt.param, OR_CUT)
    return tokenizer.encode(prompt.text, add_special_tokens)


def check_length(
    characters: int, tokenizer: Tokenizer, max_model_len: int, param: str, more: str = ""
) -> None:
    """Refuses a text of so many characters that it cannot fit the context.

    Args:
        more: what else helps but a shorter one.

    Raises:
        ContextLengthExceeded: it has too many tokens even if all are the longest.
    """
    least = -(-characters // tokenizer.longest_token)
    if least > max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {max_model_len} tokens, however the "
            f"prompt is too long: it has at least {least} tokens ({characters} "
            f"characters). Please shorten it{more}.",
            param,
        ).sized(-(-characters // tokenizer.longest_token), max_model_len - 1)


def truncated(
    ids: list[int],
    params: SamplingParams,
    max_model_len: int,
    side: Side = "left",
    *,
    uncut: str = "",
) -> list[int]:
    """At most ``truncate_prompt_tokens`` of the ids: the last ones, or with side "right" the first.

    Args:
        uncut: what the prompt has that cannot be cut: "images", say.

    Raises:
        InvalidRequest: it asks for more than the context has, or would cut what is ``uncut``.
    """
    length = params.truncate_prompt_tokens
    if length is None:
        return ids
    if length > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at most {max_model_len}, the context, "
            f"got {str(length)[:24]}.",
            "truncate_prompt_tokens",
            "integer_above_max_value",
        )
    if length < 0:
        room = params.max_tokens or 1
        # An answer that cannot fit is cut, too: it leaves half of the context to the prompt.
        length = max_model_len - (room if room < max_model_len else max_model_len // 2)
    if uncut and length < len(ids):
        name = "truncate_prompt_tokens"
        raise InvalidRequest(f"A prompt with {uncut} is not truncated.", name)
    return ids[-length:] if side == "left" else ids[:length]


def check_salt(salt: object, param: str = SALT) -> str:
    """Returns a valid salt, which separates a caller's cached pages from those of others.

    Raises:
        InvalidRequest: empty, too long, not a string, or an invalid character.
    """
    if not isinstance(salt, str):
        raise InvalidRequest(f"{param} must be a string.", param, "invalid_type")
    if not 0 < len(salt) <= MAX_SALT or NOT_IN_SALT & set(salt):
        raise InvalidRequest(
            f"{param} has 1 to {MAX_SALT} characters, none of them @, /, \\ or NUL.", param
        )
    return salt


def _read(value: Any, param: str) -> WrittenPrompt:
    if isinstance(value, str):
        return WrittenPrompt(param, text=_text(value, param))
    if isinstance(value, Mapping):
        return _read_dict(value, param)
    if isinstance(value, list | tuple):
        return WrittenPrompt(param, ids=_token_ids(value, param))
    raise _not_a_prompt(param)


def _read_dict(value: Mapping[str, Any], param: str) -> WrittenPrompt:
    given = {name: item for name, item in value.items() if item is not None}
    unknown = given.keys() - {TEXT, IDS, SALT}
    if unknown or not given.keys() & {TEXT, IDS}:
        raise InvalidRequest(
            f"'{param}': a prompt object has '{TEXT}' or '{IDS}', and at most '{SALT}' beside it.",
            param,
            "invalid_type",
        )
    salt = check_salt(given[SALT], f"{param}.{SALT}") if SALT in given else None
    if IDS in given:  # as in vLLM, the text beside them is only shown
        ids, path = given[IDS], f"{param}.{IDS}"
        if not isinstance(ids, list | tuple):
            raise _not_a_prompt(path)
        shown = given[TEXT] if isinstance(given.get(TEXT), str) else None
        return WrittenPrompt(param, ids=_token_ids(ids, path), cache_salt=salt, shown=shown)
    if not isinstance(given[TEXT], str):
        raise _not_a_prompt(f"{param}.{TEXT}")
    return WrittenPrompt(param, text=_text(given[TEXT], f"{param}.{TEXT}"), cache_salt=salt)


def _not_a_prompt(path: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{path}': a prompt is a string or a list of token ids, and all prompts are of one kind.",
        path,
        "invalid_type",
    )


def _text(value: str, path: str) -> str:
    if not value:
        raise InvalidRequest(f"'{path}' must not be empty.", path, "empty_prompt")
    return value


def _token_ids(value: Sequence[Any], path: str) -> list[int]:
    if not value:
        raise InvalidRequest(f"'{path}' must not be empty.", path, "empty_array")
    for i, token in enumerate(value):
        if type(token) is not int:
            raise InvalidRequest(
                f"'{path}[{i}]' must be a token id.", f"{path}[{i}]", "invalid_type"
            )
    return list(value)
