"""Communication between the runners of a group: tensor sums and parts, hidden states, tokens.

NCCL connects GPUs. Gloo connects CPUs, and carries what stays on the host. The process groups
belong to a ``ProcessGroups`` instead of torch's global state: two ranks may be threads of one
process, and a new epoch opens new connections, so that it gets no message of an old step.
"""

import atexit
import logging
import os
import re
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
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

logger = logging.getLogger(__name__)

SENDS_UNDER_WAY = 16

LEVEL = "NCCL_DEBUG"
CHANNEL = re.compile(
    r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\](?: \[\w+\])? via ([\w/-]+)"
)
"""A line of NCCL's log: "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"."""


@dataclass(frozen=True, slots=True)
class _Agreement:
    """An agreement in progress, with the tensors that it uses."""

    work: Any
    state: torch.Tensor  # [2] step, sums so far
    parts: list[torch.Tensor]  # of each rank


class ProcessGroups:
    """One rank's connections: within its stage, and to the same tensor rank of other stages."""

    def __init__(self, place: ParallelRank, device: torch.device) -> None:
        self.place = place
        self.device = device
        self._tensor: Any = None  # torch's process groups; None if this rank is alone
        self._hidden: Any = None
        self._tokens: Any = None
        self._agreed: Any = None
        self._agreement: _Agreement | None = None
        self._sent = deque[tuple[Any, torch.Tensor]]()  # keeps tensors until they are received
        self._messages = Counter[str]()  # number of messages of each kind, which are the tags
        self._transport = TransportLog() if device.type == "cuda" else None

    def connect(self, name: str, seconds: float = PEER_STEP_SECONDS) -> None:
        """Opens new connections; all ranks call it with the same new name.

        Raises:
            PeerLost: A peer does not connect.
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
        if self._transport is not None and self._tensor is not None:
            zero = torch.zeros(1, device=self.device)  # NCCL connects at the first sum
            _or_lost(lambda: self._tensor.allreduce([zero]).wait())
            if tensor_rank == 0:
                self._transport.tell()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sums x over the ranks of this stage, in place; all ranks get the same bits."""
        if self._tensor is not None and x.numel():
            if failpoints.ACTIVE and failpoints.ACTIVE.hit("peers.sum") == "drop":
                return x
            self._messages["sums"] += 1
            x = x.contiguous()
            _or_lost(lambda: self._tensor.allreduce([x]).wait())
        return x

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within it sums are recorded: a graph repeats them, and their number is fixed."""
        before = self._messages["sums"]
        try:
            yield
        finally:
            self._messages["sums"] = before

    def all_agree(self, yes: bool) -> bool:
        """Returns whether all ranks of this stage say yes; each of them asks.

        Raises:
            PeerLost: A peer is gone.
        """
        if self._agreed is None:
            return yes
        said = torch.tensor([int(yes)])
        parts = [torch.empty_like(said) for _ in range(self.place.tensor_size)]
        _or_lost(lambda: self._agreed.allgather([parts], [said]).wait())
        return all(bool(part) for part in parts)

    def begin_agreement(self, step: int) -> None:
        """Sends this rank's step and number of sums, once all sums of a step are queued.

        Raises:
            PeerLost: A peer is gone.
        """
        if self._agreed is None:
            return
        state = torch.tensor([step, self._messages["sums"]])
        parts = [torch.empty_like(state) for _ in range(self.place.tensor_size)]
        work = _or_lost(lambda: self._agreed.allgather([parts], [state]))
        self._agreement = _Agreement(work, state, parts)

    def agree(self, step: int) -> None:
        """Checks that all ranks of this stage are at the same step with the same number of sums.

        A sum has no tag: if a rank skips one, its next sum takes its place and results are silently
        wrong. The check runs between the processes and waits for no device.

        Raises:
            PeerLost: The ranks differ.
        """
        if self._agreement is None:
            self.begin_agreement(step)
        agreement, self._agreement = self._agreement, None
        if agreement is None:
            return
        _or_lost(agreement.work.wait)
        states = [tuple(part.tolist()) for part in agreement.parts]
        if len(set(states)) > 1:
            raise PeerLost(f"the ranks are not in step: {states} of (step, sums)")

    def concatenate(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] of each rank of this stage as [..., N * tensor size], on each of them."""
        if self._tensor is None or not x.numel():
            return x.repeat(*[1] * (x.dim() - 1), self.place.tensor_size)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.place.tensor_size)]
        _or_lost(lambda: self._tensor.allgather([parts], [x]).wait())
        return torch.cat(parts, dim=-1)

    def send_hidden(self, x: torch.Tensor) -> None:
        """Sends hidden states to the next stage, without waiting."""
        self._send(self._hidden, x.contiguous(), self.place.stage + 1, self._tag("sent"))

    def receive_hidden(self, like: torch.Tensor) -> torch.Tensor:
        """Receives the previous stage's hidden states, in the shape and dtype of ``like``."""
        x, tag = torch.empty_like(like), self._tag("received")
        before = self.place.stage - 1
        _or_lost(lambda: self._hidden.recv([x], before, tag).wait())
        return x

    def send_tokens(self, tokens: Int32Array) -> None:
        """Sends sampled tokens [S] to all earlier stages."""
        tag = self._tag("tokens")
        for stage in range(self.place.stage):
            self._send(self._tokens, torch.from_numpy(tokens.copy()), stage, tag)

    def receive_tokens(self, count: int) -> Int32Array:
        """Receives the next ``count`` tokens that the last stage sampled."""
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
        """The number of the message, which both ends count."""
        self._messages[kind] += 1
        return self._messages[kind] % 2**30


class TransportLog:
    """Logs how NCCL connects ranks: by NVLink or PCIe (P2P), host memory (SHM), a network (NET).

    NCCL says it only in its own log, in which a slow way looks like any other. It writes that to a
    file, unless the environment says where: this comes before its first use.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._read = 0  # bytes
        if LEVEL in os.environ:
            return
        handle, name = tempfile.mkstemp(prefix="nccl-", suffix=".log")
        os.close(handle)
        self._file = Path(name)
        atexit.register(self._file.unlink, missing_ok=True)
        os.environ |= {LEVEL: "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": name}

    def tell(self) -> None:
        """Logs the connections that were opened since the last call."""
        if self._file is None:
            return
        text = self._file.read_bytes()[self._read :]
        self._read += len(text)
        for (first, second), ways in channels(text.decode(errors="replace")).items():
            counted = ", ".join(f"{way} ({count} channels)" for way, count in ways.items())
            logger.info("NCCL connects rank %d to rank %d by %s", first, second, counted)


def channels(text: str) -> dict[tuple[int, int], Counter[str]]:
    """Counts channels by transport, of each pair of ranks in a log of NCCL."""
    pairs: dict[tuple[int, int], Counter[str]] = {}
    for first, second, way in CHANNEL.findall(text):
        pairs.setdefault((int(first), int(second)), Counter())[way] += 1
    return pairs


def open_store() -> Any:
    """Opens the store through which ranks connect; rank 0 has to keep a reference to it."""
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
    """Turns torch's errors for broken connections and timeouts into PeerLost."""
    try:
        return call()
    except RuntimeError as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PeerLost(f"a runner of this group does not answer: {first_line}") from error
