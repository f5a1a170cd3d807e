"""Arguments and attributes of vLLM's ``LLM`` that Rayfin lacks, and what is near."""

from collections.abc import Callable
from typing import Any, NoReturn

from rayfin.actors.errors import InvalidRequest

ARGUMENTS = {
    "tokenization_kwargs": "SamplingParams(truncate_prompt_tokens=), or token ids as prompts",
    "mm_processor_kwargs": "LLM(mm_processor_kwargs=)",
    "lora_request": "generate and chat, which take adapters",
    "prompt_adapter_request": "lora_request",
    "guided_options_request": "SamplingParams(structured_outputs=)",
    "chat_template": "a model whose tokenizer has the template",
}
ATTRIBUTES = {
    "llm_engine": "get_metrics(), stats() and get_tokenizer()",
    "model_config": "the model's config.json",
    "start_profile": "get_metrics()",
    "stop_profile": "get_metrics()",
    "collective_rpc": "chat, generate and encode",
    "apply_model": "chat, generate and encode",
    "set_tokenizer": "LLM(tokenizer=)",
    "reward": "encode()",
    "get_world_size": "LLM(tensor_parallel_size=, pipeline_parallel_size=)",
    "reset_mm_cache": "reset_prefix_cache()",
    "from_engine_args": "LLM(model, ...)",
}

ASYNC_METHODS = {
    "init_weight_transfer_engine": "update_weights()",
    "scale_elastic_ep": "rayfin serve --max-engines",
}


def refuse(**arguments: Any) -> None:
    """Refuses arguments that ask for something.

    Raises:
        InvalidRequest: it names the argument, and what is near.
    """
    for name, value in arguments.items():
        if value is not None and value != {}:
            near = ARGUMENTS[name]
            raise InvalidRequest(
                f"{name} is not supported here. Near it is {near}.", name, "unsupported_parameter"
            )


def no_attribute(name: str) -> AttributeError:
    """Makes the error for an attribute that ``LLM`` lacks."""
    near = f". Near it is {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
    return AttributeError(f"LLM has no {name!r}{near}")


def no_async_method(name: str) -> Callable[..., NoReturn]:
    """Makes the method for one of vLLM's that ``AsyncLLM`` lacks.

    Raises:
        AttributeError: vLLM has none of that name either.
    """
    if name not in ASYNC_METHODS:
        raise AttributeError(f"AsyncLLM has no {name!r}")

    def lacking(*args: object, **settings: object) -> NoReturn:
        raise NotImplementedError(f"AsyncLLM has no {name}. What works is {ASYNC_METHODS[name]}")

    return lacking
