"""The inputs of a body: texts, token ids or a conversation, as tokens."""

from functools import partial
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.deployments.generation.generation import off_loop
from rayfin.deployments.generation.prompt_forms import (
    OR_CUT,
    WrittenPrompt,
    check_length,
    read_prompts,
)
from rayfin.deployments.generation.prompts import chat_ids
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.pooling.bodies import InputBody
from rayfin.deployments.pooling.inputs import (
    MAX_INPUTS,
    PoolingInput,
    instruction,
    text_input,
)


async def read_inputs(
    service: OpenAIService, recipe: PoolingRecipe, body: InputBody, param: str = "input"
) -> tuple[list[PoolingInput], list[str]]:
    """The tokens of all inputs, and the path of each, for errors.

    Raises:
        InvalidRequest: an input is empty, of another type, or too long.
    """
    limit = body.cut.limit(service.max_model_len)
    if body.messages is not None:
        ids = await chat_ids(
            service,
            body.messages,
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            variables=body.chat_template_kwargs,
            chat_template=body.chat_template,
            any_length=limit is not None,
        )
        return [PoolingInput(_cut(ids, limit, body.cut.side))], ["messages"]
    prompts = _prompts(body.input, param)
    prefix = instruction(recipe, body.prompt_name)

    def tokens() -> list[PoolingInput]:
        return [one(prompt) for prompt in prompts]

    def one(prompt: WrittenPrompt) -> PoolingInput:
        if prompt.text is None:
            return PoolingInput(_cut(list(prompt.ids or ()), limit, body.cut.side))
        if limit is None:
            length = len(prefix) + len(prompt.text)
            check_length(length, service.tokenizer, service.max_model_len, prompt.param, OR_CUT)
        return text_input(
            *(service.tokenizer, recipe, prompt.text),
            prefix=prefix,
            add_special_tokens=body.add_special_tokens is not False,
            limit=limit,
            side=body.cut.side,
        )

    characters = sum(len(prompt.text or "") for prompt in prompts)
    return await off_loop(characters, partial(tokens)), [prompt.param for prompt in prompts]


def _prompts(value: Any, param: str) -> list[WrittenPrompt]:
    if value is None:
        raise InvalidRequest(
            f"you must provide a '{param}' parameter", param, "missing_required_parameter"
        )
    if isinstance(value, dict):
        raise InvalidRequest(
            f"'{param}' must be a text, token ids, or a list of either.", param, "invalid_type"
        )
    try:
        return read_prompts(value, param, max_prompts=MAX_INPUTS)
    except InvalidRequest as error:
        if error.code == "empty_array":  # one code for all that is empty
            raise InvalidRequest(error.message, error.param, "empty_prompt") from None
        raise


def _cut(ids: list[int], limit: int | None, side: str) -> list[int]:
    if limit is None:
        return ids
    return ids[:limit] if side == "right" else ids[-limit:]
