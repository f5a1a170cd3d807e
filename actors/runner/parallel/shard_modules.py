"""What stands in the place of a module of which a rank has a share, or none."""

from typing import Any

import torch
from torch import nn

from rayfin.actors.runner.parallel.process_groups import ProcessGroups

SHARD = "shard"  # what a wrapped module is called within its wrapper


class Summed(nn.Module):
    """The sum over ranks of what their shares give."""

    def __init__(self, shard: nn.Module, peers: ProcessGroups) -> None:
        super().__init__()
        self.shard = shard
        self._peers = peers

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """[..., N], as the shard has it."""
        return self._peers.sum(self.shard(*inputs, **named))


class RowParallel(nn.Module):
    """y = sum over ranks of x_r W_r^T, + b."""

    def __init__(self, shard: nn.Linear, bias: nn.Parameter | None, peers: ProcessGroups) -> None:
        super().__init__()
        self.shard = shard
        self.bias = bias
        self._peers = peers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K / ranks] -> [..., N]."""
        y = self._peers.sum(self.shard(x))
        return y if self.bias is None else y + self.bias


class SharedNorm(nn.Module):
    """A root mean square norm over what all ranks have; each scales its share.

    Args:
        weight: this rank's share, [N / ranks].
        whole: N.
    """

    def __init__(self, weight: nn.Parameter, eps: float, whole: int, peers: ProcessGroups) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps
        self._whole = whole
        self._peers = peers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N / ranks] -> the same shape and dtype, computed in float32."""
        own = x.float()
        squares = self._peers.sum(own.square().sum(-1, keepdim=True))
        scaled = own * torch.rsqrt(squares / self._whole + self._eps)
        return (self.weight * scaled).to(x.dtype)


class GatheredHead(nn.Module):
    """Each rank computes its share of the vocabulary; all get all logits."""

    def __init__(self, shard: nn.Linear, vocab_size: int, peers: ProcessGroups) -> None:
        super().__init__()
        self.shard = shard
        self._vocab_size = vocab_size
        self._peers = peers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., V]."""
        return self._peers.concatenate(self.shard(x))[..., : self._vocab_size]


class NoEmbedding(nn.Module):
    """On a stage after the first: what it gives is only looked at for its shape."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self._dtype = dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[..., T] -> [..., T, hidden] of zeros."""
        shape = (*input_ids.shape, self._hidden_size)
        return torch.zeros(shape, dtype=self._dtype, device=input_ids.device)


class ElsewhereLayer(nn.Module):
    """In the place of a layer of another stage; next to this stage's it receives, or sends."""

    def __init__(
        self, layer: nn.Module, peers: ProcessGroups, *, receives: bool = False, sends: bool = False
    ) -> None:
        super().__init__()
        self.attention_type: Any = getattr(layer, "attention_type", None)  # some models ask for it
        self._peers = peers
        self._receives = receives
        self._sends = sends

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[1, T, hidden] -> the same shape."""
        if self._receives:
            return self._peers.receive_hidden(hidden_states)
        if self._sends:
            self._peers.send_hidden(hidden_states)
        return hidden_states
