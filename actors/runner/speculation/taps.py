"""Hidden states of a model while it computes, for heads that read them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.cpu.decoder import compiled_decoder
from rayfin.actors.runner.models.step_model import HookedStates

States = Callable[[], torch.Tensor]
"""Gives the states [T, width] of the tokens of the last step."""


def tap_layers(model: Any, layers: Sequence[int]) -> States:
    """The inputs of the ``layers``, rising, of each token, one after the other.

    Raises:
        InvalidConfig: the model has fewer layers, or shows none.
    """
    if (fused := compiled_decoder(model)) is not None:
        _require_layers(layers, len(fused.layouts))
        return fused.tap(layers)
    decoder_layers = getattr(_decoder(model), "layers", ())
    _require_layers(layers, len(decoder_layers))
    hooked = HookedStates()

    def keep(place: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        hooked.kept[place] = states[0]

    for place, layer in enumerate(layers):
        hook = partial(keep, place)
        decoder_layers[layer].register_forward_pre_hook(hook, with_kwargs=True)
    return hooked


def tap_last(model: Any) -> States:
    """What the model's last norm gives for each token.

    Raises:
        InvalidConfig: the model shows no such norm.
    """
    if (fused := compiled_decoder(model)) is not None:
        return fused.tap_last()
    norm = getattr(_decoder(model), "norm", None)
    if norm is None:
        raise InvalidConfig(
            "speculative_config: the model shows no hidden states", "speculative_config"
        )
    hooked = HookedStates()

    def keep(_: Any, __: Any, output: torch.Tensor) -> None:
        hooked.kept[0] = output[0]

    norm.register_forward_hook(keep)
    return hooked


def embedding_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's embedding: tokens [..., T] -> [..., T, hidden]."""
    if (fused := compiled_decoder(model)) is not None:
        return fused.embed
    embedding: Callable[[torch.Tensor], torch.Tensor] = model.transformer.get_input_embeddings()
    return embedding


def head_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's head: what its last norm gives [..., hidden] -> logits [..., V]."""
    if (fused := compiled_decoder(model)) is not None:
        return fused.score
    head: Callable[[torch.Tensor], torch.Tensor] = model.transformer.get_output_embeddings()
    return head


def _decoder(model: Any) -> Any:
    transformer = getattr(model, "transformer", None)
    return None if transformer is None else transformer.get_decoder()


def _require_layers(layers: Sequence[int], count: int) -> None:
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] < count:
        raise InvalidConfig(
            f"speculative_config: the head reads the layers {list(layers)}, which must rise",
            "speculative_config",
        )
    if layers[-1] >= count:
        raise InvalidConfig(
            f"speculative_config: the head reads layer {layers[-1]}, and the model has {count}",
            "speculative_config",
        )
