"""What stands behind the pooling: dense layers, normalization, or the head of a classifier."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.hub import cached_file

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.pooling_recipe import DenseLayer, PoolingRecipe


class VectorHead:
    """Dense layers, then normalization to length one, as the recipe says."""

    def __init__(self, recipe: PoolingRecipe, dense: list[nn.Module]) -> None:
        self._dense = dense
        self._normalize = recipe.normalize

    @torch.inference_mode()
    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, D]."""
        rows = pooled
        for layer in self._dense:
            rows = by_rows(layer, rows)
        return nn.functional.normalize(rows, p=2, dim=-1) if self._normalize else rows


class ClassifierHead:
    """The modules of a ``*ForSequenceClassification`` that follow its base model.

    Its own forward runs over a stand-in for the base model that gives the pooled rows.
    """

    def __init__(self, model: Any, base: nn.Module) -> None:
        (name,) = [name for name, child in model.named_children() if child is base]
        setattr(model, name, _Given(getattr(base, "pooler", None)))
        self._given: _Given = getattr(model, name)
        self._model = model

    @torch.inference_mode()
    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, labels]."""
        return by_rows(self._logits, pooled)

    def _logits(self, row: torch.Tensor) -> torch.Tensor:
        self._given.rows = row
        token = torch.ones(1, 1, dtype=torch.int64, device=row.device)
        logits: torch.Tensor = self._model(input_ids=token).logits
        return logits


class LinearHead:
    """Rows of a matrix: logits of labels."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight.detach().float()
        self._bias = None if bias is None else bias.detach().float()

    @torch.inference_mode()
    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, labels]."""
        return by_rows(lambda row: nn.functional.linear(row, self._weight, self._bias), pooled)


class _Given(nn.Module):
    """In place of a base model: its output is ``rows``, with the base model's own pooler."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.rows = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPooling:
        states = self.rows.unsqueeze(1)
        pooled = None if self.pooler is None else self.pooler(states)
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=pooled)


def by_rows(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """``layer`` of each row [1, H] alone: torch's products of several rows have other bits."""
    return torch.cat([layer(rows[i : i + 1]) for i in range(len(rows))])


def load_dense(args: EngineArgs, layer: DenseLayer, device: torch.device) -> nn.Module:
    """A dense layer with its weights.

    Raises:
        InvalidConfig: it has no safetensors, or others than its config says.
    """
    path = _file(args, f"{layer.folder}/model.safetensors")
    module = _Dense(layer)
    try:
        module.load_state_dict(load_file(path))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise InvalidConfig(f"{layer.folder} does not fit its config: {reason}", "model") from None
    return module.to(device).eval().requires_grad_(False)


class _Dense(nn.Module):
    def __init__(self, layer: DenseLayer) -> None:
        super().__init__()
        self.linear = nn.Linear(layer.inputs, layer.outputs, layer.bias)
        self.activation: nn.Module = getattr(nn, layer.activation)()
        self.residual: nn.Module | None = None
        self._residual = layer.residual
        if layer.residual and layer.inputs != layer.outputs:
            self.residual = nn.Linear(layer.inputs, layer.outputs, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.activation(self.linear(rows))
        if not self._residual:
            return out
        return out + (rows if self.residual is None else self.residual(rows))


def _file(args: EngineArgs, name: str) -> Path:
    if Path(args.model).is_dir():
        path = Path(args.model) / name
        if path.is_file():
            return path
    else:
        cached = cached_file(
            args.model, name, revision=args.revision, _raise_exceptions_for_missing_entries=False
        )
        if cached is not None:
            return Path(cached)
    raise InvalidConfig(f"{args.model} holds no {name}; Rayfin loads no pickled weights", "model")
