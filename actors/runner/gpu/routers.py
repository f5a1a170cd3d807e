"""Replaces the routers of mixtures by one kernel behind their product.

A router scores the experts of a row, corrects and chooses, in six to eight small launches. What it
does is found out by running it: forms of the kernel are tried until one gives what it gives.
"""

import copy
import inspect
import itertools
import logging
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from rayfin.actors.runner.gpu.experts import GroupedExperts
from rayfin.kernels.shapes import Routing
from rayfin.kernels.triton.experts import choose_experts

logger = logging.getLogger(__name__)

PROBE_ROWS = 32

Choice = tuple[torch.Tensor, torch.Tensor]
"""Shares [T, K] of experts, and their ids [T, K]."""

Tensors = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""A router's weight [E, H], bias [E], and correction [E] of scores for the choice alone."""


class FusedRouter(nn.Module):
    """Replaces transformers' routers: same arguments, same results, the best expert first."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    correction: torch.Tensor | None

    def __init__(
        self,
        tensors: Tensors,
        routing: Routing,
        dtype: torch.dtype,  # of shares
        *,
        wide: bool,  # logits are products in float32
    ) -> None:
        super().__init__()
        for name, tensor in zip(("weight", "bias", "correction"), tensors, strict=True):
            if tensor is not None and wide:
                tensor = tensor.float()
            parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)
        self.routing, self._dtype, self._wide = routing, dtype, wide

    def forward(
        self,
        hidden_states: torch.Tensor,  # [..., H]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [T, E], shares [T, K] of the chosen experts, and their ids [T, K]."""
        x = hidden_states.reshape(-1, self.weight.shape[1])
        logits = F.linear(x.float() if self._wide else x, self.weight, self.bias)
        return logits, *choose_experts(logits, self.correction, self.routing, self._dtype)


@torch.no_grad()
def fuse_routers(model: nn.Module, dtype: torch.dtype) -> int:
    """Replaces the routers beside `GroupedExperts` in place; returns how many.

    A router that no form of the kernel equals stays.
    """
    places = [
        (owner, name, child)
        for owner in list(model.modules())
        if any(isinstance(one, GroupedExperts) for one in owner.children())
        for name, child in list(owner.named_children())
        if _tensors(child) is not None
    ]
    rest = list[str]()
    for owner, name, router in places:
        try:
            fused = _fused(router, dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler's, the launcher's or the device's
            lines = str(error).strip().splitlines() or [""]
            rest.append(f"{type(error).__name__}: {lines[0]}")
            continue
        if fused is None:
            rest.append(f"no kernel does what {type(router).__name__} does")
        else:
            setattr(owner, name, fused)
    if rest:
        logger.info("%d routers stay modules: %s", len(rest), rest[0])
    return len(places) - len(rest)


def _tensors(module: nn.Module) -> Tensors | None:
    """Weight, bias and correction of a module in the form of a router; None of others."""
    tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    weight, bias = tensors.pop("weight", None), tensors.pop("bias", None)
    if weight is None or weight.dim() != 2 or isinstance(module, nn.Linear) or len(tensors) > 1:
        return None
    correction = next(iter(tensors.values()), None)
    if any(one is not None and one.shape != weight.shape[:1] for one in (bias, correction)):
        return None
    takes_rows = len(inspect.signature(module.forward).parameters) == 1
    return (weight, bias, correction) if takes_rows else None


def _fused(router: nn.Module, dtype: torch.dtype) -> FusedRouter | None:
    """The form of the kernel that gives what a router gives, or None.

    Both are run with other numbers, since those of a checkpoint may hide a difference, such as
    corrections that are zero.
    """
    probe, random = copy.deepcopy(router), torch.Generator().manual_seed(7)
    stored, tensors = _tensors(router), _tensors(probe)
    assert stored is not None and tensors is not None
    weight, *beside = tensors
    count, hidden = weight.shape
    weight.copy_(torch.randn(weight.shape, generator=random) / hidden**0.5)
    for tensor in beside:
        if tensor is not None:
            tensor.copy_(torch.randn(count, generator=random) / count)
    x = torch.randn(PROBE_ROWS, hidden, generator=random).to(weight.device, dtype)
    given = probe(x)
    if not isinstance(given, tuple) or len(given) != 3 or given[0].shape != (len(x), count):
        return None
    logits, shares, ids = given
    wide = weight.dtype != dtype or not _same(F.linear(x, weight, beside[0]), logits)
    rows = _without_ties(logits, ids.shape[1])
    for routing in _routings(router, count, ids.shape[1], corrected=beside[1] is not None):
        mine = FusedRouter(tensors, routing, shares.dtype, wide=wide)(x)
        if not _same(mine[0], logits):
            return None
        if _equal(*((one[rows], two[rows]) for one, two in (mine[1:], given[1:]))):
            return FusedRouter(stored, routing, shares.dtype, wide=wide)
    return None


def _routings(
    router: nn.Module, experts: int, choices: int, *, corrected: bool
) -> Iterator[Routing]:
    """What a router may do, by the numbers that it holds, the likeliest first."""
    scale: float = getattr(router, "routed_scaling_factor", 1.0)
    groups, kept = (getattr(router, name, None) or 1 for name in ("num_group", "topk_group"))
    groupings = [(1, 1, False)]
    if kept < groups and experts % groups == 0 and kept * experts // groups >= choices:
        groupings = [(groups, kept, pairs) for pairs in (corrected, not corrected)] + groupings
    for sigmoid, normed, grouping in itertools.product(
        (corrected, not corrected), (True, False), groupings
    ):
        yield Routing(choices, sigmoid, normed, scale, *grouping)


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one.float(), two.float(), rtol=1e-5, atol=1e-5)


def _without_ties(logits: torch.Tensor, choices: int) -> torch.Tensor:
    """Rows whose last choice differs from the one after it; in 16 bits some do not."""
    if choices >= logits.shape[1]:
        return torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    last, following = logits.topk(choices + 1, dim=1).values[:, -2:].unbind(dim=1)
    return last > following


def _equal(one: Choice, two: Choice) -> bool:
    """Whether shares and ids are the same, in any order."""
    order, wanted_order = one[1].argsort(dim=1), two[1].argsort(dim=1)
    if not len(order) or not torch.equal(one[1].gather(1, order), two[1].gather(1, wanted_order)):
        return False
    shares, wanted = one[0].gather(1, order).float(), two[0].gather(1, wanted_order).float()
    tolerance = 1e-5 + 2 * torch.finfo(two[0].dtype).eps
    return torch.allclose(shares, wanted, rtol=tolerance, atol=1e-6)
