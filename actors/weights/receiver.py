"""Receives a trainer's tensors as one member of its group, for all engines of a deployment.

No engine is in the group: a trainer that hangs or dies costs this process, and nothing else.
"""

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from rayfin.actors.errors import EngineBusy, EngineUnavailable, InvalidRequest
from rayfin.actors.timing import WEIGHTS_BUCKET_SECONDS, WEIGHTS_PAUSE_SECONDS
from rayfin.actors.weights.begun import BegunUpdate
from rayfin.actors.weights.store import WeightStore
from rayfin.actors.weights.tensors import NAMES, add_tensor, plain_name
from rayfin.actors.weights.version import WeightVersion
from rayfin.actors.weights.writer import TensorWriter

DTYPES = {str(kind).removeprefix("torch."): kind for kind in NAMES}
SOURCE = 0
"""The trainer's rank, as in vLLM."""


class WeightReceiver:
    """The one member of a gloo group that is not the trainer; a process has one at most.

    Args:
        seconds: that one tensor may take.
    """

    def __init__(self, store: WeightStore, seconds: float = WEIGHTS_BUCKET_SECONDS) -> None:
        self._store, self._seconds = store, seconds
        self._writer: TensorWriter | None = None
        self._prefix = ""
        self._called = time.monotonic()

    def join(self, address: str, port: int, rank: int) -> None:
        """Joins the group that the trainer, of rank 0, opens there.

        Raises:
            InvalidRequest: it cannot be joined.
        """
        self.leave()
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{address}:{port}",
                rank=rank,
                world_size=rank + 1,
                timeout=timedelta(seconds=self._seconds),
            )
        except (RuntimeError, ValueError) as error:
            first = str(error).splitlines()[0][:200]
            raise InvalidRequest(
                f"init_info: {address}:{port} has no group: {first}", "init_info"
            ) from None

    def begin(self, prefix: str = "") -> None:
        """Begins a version.

        Args:
            prefix: in front of the names that come.

        Raises:
            EngineBusy: there is no group, or an update is begun.
        """
        if not dist.is_initialized():
            raise EngineBusy("no group is joined: /init_weight_transfer_engine comes first")
        BegunUpdate(self._store).check_free()
        self._drop()
        self._writer, self._prefix = self._store.writer(), prefix

    def receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Receives tensors, one broadcast each, in this order.

        Raises:
            EngineBusy: no version is begun.
            InvalidRequest: one is not of floating-point numbers, or its name came before.
            EngineUnavailable: the trainer does not send.
        """
        if self._writer is None:
            raise EngineBusy("no update is begun: /start_weight_update comes first")
        self._called = time.monotonic()
        if not len(names) == len(dtypes) == len(shapes):
            raise InvalidRequest("names, dtype_names and shapes differ in length", "update_info")
        for name, dtype in zip(names, dtypes, strict=True):
            if dtype not in DTYPES:  # before anything is sent
                known = ", ".join(DTYPES)
                raise InvalidRequest(f"dtype_names: {name} is {dtype}, not {known}", "update_info")
        try:
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                tensor = torch.empty(*shape, dtype=DTYPES[dtype])
                dist.broadcast(tensor, SOURCE)
                add_tensor(self._writer, self._prefix + plain_name(name), tensor)
        except RuntimeError as error:
            self.leave()
            raise EngineUnavailable(f"the trainer does not send: {error}"[:300]) from None

    def finish(self, label: str) -> WeightVersion:
        """Keeps what has come as the version that is begun; an update may take it.

        Raises:
            EngineBusy: no version is begun.
            StorageFull: there is no room.
        """
        writer, self._writer = self._writer, None
        if writer is None:
            raise EngineBusy("no update is begun: /start_weight_update comes first")
        path, digest = writer.finish()
        version = WeightVersion(0, label, digest, str(path))
        BegunUpdate(self._store).keep(version)
        return version

    def leave(self) -> None:
        """Leaves the group, and drops what has come."""
        self._drop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def watch(self) -> None:
        """Ends this process, in a thread, once no trainer has called for a while."""

        def leave() -> None:
            while time.monotonic() - self._called < WEIGHTS_PAUSE_SECONDS:
                time.sleep(1.0)
            os._exit(0)

        threading.Thread(target=leave, name="watch", daemon=True).start()
