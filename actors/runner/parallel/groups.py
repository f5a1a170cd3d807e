"""What the runners of a group say to each other: sums and parts of tensors, hidden states, tokens.

NCCL between GPUs; Gloo between CPUs, and for what only the processes need to know. The process
groups belong to a ``ProcessGroups``, not to torch's global state: two ranks may be threads of one
process, and a new epoch begins on new connections, so that no message of an old step is taken
for one of a new step.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed

from rayfin.actors import failpoints
from rayfin.actors.errors import PeerLost
from rayfin.actors.messages import Int32Array
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.timing import PEER_STEP_SECONDS

dist: Any = torch.distributed  # whose stubs leave out half of this


SENDS_UNDER_WAY = 16


@dataclass(frozen=True, slots=True)
class _Agreement:
    """That is under way; tensors live until then."""

    work: Any
    own: torch.Tensor  # [2] step, sums so far
    parts: list[torch.Tensor]  # of each rank


class ProcessGroups:
    """One rank's connections: to those that share its layers, and to its like in other stages."""

    def __init__(self, place: ParallelRank, device: torch.device) -> None:
        self.place = place
        self.device = device
        self._tensor: Any = None  # process groups of torch; None where there is nobody else
        self._hidden: Any = None
        self._tokens: Any = None
        self._agreed: Any = None
        self._agreement: _Agreement | None = None
        self._sent = deque[tuple[Any, torch.Tensor]]()  # a tensor lives until it has arrived
        self._messages = Counter[str]()  # of each kind so far: their tags

    def connect(self, name: str, seconds: float = PEER_STEP_SECONDS) -> None:
        """New connections, which all ranks make under the same new name.

        Raises:
            PeerLost: a peer does not come.
        """
        place, patience = self.place, timedelta(seconds=seconds)
        self._sent.clear()
        self._messages.clear()
        self._agreement = None
        stage, tensor_rank = place.stage, place.tensor_rank

        def group(what: str, rank: int, size: int, device: str) -> Any:
            if size == 1:
                return None
            prefixed = dist.PrefixStore(f"{name}/{what}", store)
            make = _nccl if device == "cuda" else _gloo
            return make(prefixed, rank, size, patience, place.host)

        def connect() -> None:
            device = self.device.type
            self._tensor = group(f"tensor/{stage}", tensor_rank, place.tensor_size, device)
            self._hidden = group(f"hidden/{tensor_rank}", stage, place.stages, device)
            self._tokens = group(f"tokens/{tensor_rank}", stage, place.stages, "cpu")
            self._agreed = group(f"agree/{stage}", tensor_rank, place.tensor_size, "cpu")

        store = _or_lost(lambda: dist.TCPStore(*place.store, None, False, timeout=patience))
        _or_lost(connect)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what the ranks of this stage hold, the same bits on each; in place."""
        if self._tensor is not None and x.numel():
            if failpoints.ACTIVE and failpoints.ACTIVE.hit("peers.sum") == "drop":
                return x
            self._messages["sums"] += 1
            x = x.contiguous()
            _or_lost(lambda: self._tensor.allreduce([x]).wait())
        return x

    def begin_agreement(self, step: int) -> None:
        """All sums of a step are queued: tells the others, whom ``agree`` hears in the end.

        Raises:
            PeerLost: a peer is gone.
        """
        if self._agreed is None:
            return
        own = torch.tensor([step, self._messages["sums"]])
        parts = [torch.empty_like(own) for _ in range(self.place.tensor_size)]
        work = _or_lost(lambda: self._agreed.allgather([parts], [own]))
        self._agreement = _Agreement(work, own, parts)

    def agree(self, step: int) -> None:
        """All ranks of this stage have queued the same sums, and are at the same step.

        A sum has no tag: one that a rank leaves out is made up of its next one, and the numbers
        are wrong without anybody knowing. The ranks' processes say so to each other, and no device
        is waited for.

        Raises:
            PeerLost: they have not.
        """
        if self._agreement is None:
            self.begin_agreement(step)
        begun, self._agreement = self._agreement, None
        if begun is None:
            return
        _or_lost(begun.work.wait)
        told = [tuple(part.tolist()) for part in begun.parts]
        if len(set(told)) > 1:
            raise PeerLost(f"the ranks are not in step: {told} of (step, sums)")

    def concatenate(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] of each rank of this stage as [..., N * tensor size], on each of them."""
        if self._tensor is None or not x.numel():
            return x.repeat(*[1] * (x.dim() - 1), self.place.tensor_size)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.place.tensor_size)]
        _or_lost(lambda: self._tensor.allgather([parts], [x]).wait())
        return torch.cat(parts, dim=-1)

    def send_hidden(self, x: torch.Tensor) -> None:
        """Hands hidden states to the next stage, without waiting for it."""
        self._send(self._hidden, x.contiguous(), self.place.stage + 1, self._tag("sent"))

    def receive_hidden(self, like: torch.Tensor) -> torch.Tensor:
        """The hidden states of the stage before, in the shape and dtype of ``like``."""
        x, tag = torch.empty_like(like), self._tag("received")
        before = self.place.stage - 1
        _or_lost(lambda: self._hidden.recv([x], before, tag).wait())
        return x

    def send_tokens(self, tokens: Int32Array) -> None:
        """Tells sampled tokens [S] to all earlier stages."""
        tag = self._tag("tokens")
        for stage in range(self.place.stage):
            self._send(self._tokens, torch.from_numpy(tokens.copy()), stage, tag)

    def receive_tokens(self, count: int) -> Int32Array:
        """The next ``count`` tokens that the last stage has sampled."""
        tokens, tag = torch.empty(count, dtype=torch.int32), self._tag("tokens")
        last = self.place.stages - 1
        _or_lost(lambda: self._tokens.recv([tokens], last, tag).wait())
        array: Int32Array = tokens.numpy().astype(np.int32, copy=False)
        return array

    def _send(self, group: Any, x: torch.Tensor, stage: int, tag: int) -> None:
        work = _or_lost(lambda: group.send([x], stage, tag))
        self._sent.append((work, x))
        while len(self._sent) > SENDS_UNDER_WAY:
            _or_lost(self._sent.popleft()[0].wait)

    def _tag(self, kind: str) -> int:
        """Both ends count, so that a message can only be taken for what it is."""
        self._messages[kind] += 1
        return self._messages[kind] % 2**30


def open_store() -> Any:
    """Where the ranks of a group will find each other; lives in rank 0, as long as it is held."""
    every_address, any_port = "0.0.0.0", 0
    return dist.TCPStore(every_address, any_port, None, True, wait_for_workers=False)


def _gloo(store: Any, rank: int, size: int, patience: timedelta, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = patience
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, patience: timedelta, host: str) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _or_lost(call: Callable[[], Any]) -> Any:
    """Raises PeerLost for what torch raises when a connection breaks or nothing comes."""
    try:
        return call()
    except RuntimeError as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PeerLost(f"a runner of this group does not answer: {first_line}") from error
