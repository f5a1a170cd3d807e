"""A model's structure without memory, whose parts get a version's tensors while they are packed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from rayfin.actors.config import EngineArgs
from rayfin.actors.runner.models.dtypes import resolve_dtype
from rayfin.actors.runner.models.mapped_weights import NARROW
from rayfin.actors.runner.models.paged_model import ATTENTION
from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.parallel.plans import Cuts, stored_name
from rayfin.actors.runner.parallel.shard_model import checkpoint_name, shard_model
from rayfin.actors.runner.parallel.shard_weights import (
    Checkpoint,
    assemble,
    make_buffers,
    saved_buffers,
)


class Skeleton:
    """A decoder on ``meta``, or a rank's share of it.

    Args:
        name: of the version, for messages.
    """

    def __init__(
        self,
        args: EngineArgs,
        config: PretrainedConfig,
        name: str,
        files: Sequence[Path],
        peers: ProcessGroups | None = None,
    ) -> None:
        device = torch.device("cpu")
        self.model = _empty(args, config, device)
        self.ties: dict[str, str] = self.model.all_tied_weights_keys
        self._cuts: Cuts = {} if peers is None else shard_model(self.model, peers)
        make_buffers(self.model, device)
        self.model.eval().requires_grad_(False)  # type: ignore[no-untyped-call]
        self.checkpoint = Checkpoint(name, files, self.model.base_model_prefix)
        self._buffers = dict(self.model.named_buffers())

    def source(self, name: str) -> str:
        """The version's name of a tensor; of a tied one, of that which it is tied to."""
        known = self.checkpoint.__contains__
        source = checkpoint_name(name)
        if source in self.ties and (self.ties[source] in self.checkpoint or not known(source)):
            source = self.ties[source]
        return stored_name(source, known)

    @property
    def wanted(self) -> Iterator[tuple[str, torch.Size]]:
        """Name and shape of each tensor that a version must have."""
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            yield name, parameter.shape
        for name in saved_buffers(self.model):
            yield name, self.model.get_buffer(name).shape

    @property
    def buffers(self) -> list[str]:
        """The buffers that versions hold."""
        return saved_buffers(self.model)

    def is_tied(self, one: str, other: str) -> bool:
        """Whether two parameters are one tensor of the version."""
        return self.source(one) == self.source(other)

    def read(self, name: str) -> torch.Tensor:
        """A parameter or buffer, as it is stored.

        Raises:
            InvalidConfig: it is missing, or has another shape.
        """
        buffer = self._buffers.get(name)
        shape = self.model.get_parameter(name).shape if buffer is None else buffer.shape
        cut, source = self._cuts.get(checkpoint_name(name)), self.source(name)
        return assemble(source, shape, cut, self.checkpoint.__contains__, self.checkpoint.read)

    def read_as(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The same, as a load gives it to a model of ``dtype``: matrices of 16 bits stay narrow."""
        tensor = self.read(name)
        narrow = dtype == torch.float32 and tensor.dtype in NARROW and tensor.dim() > 1
        return tensor if narrow else tensor.to(dtype)

    @contextmanager
    def filled(self, *paths: str) -> Iterator[None]:
        """Within it the modules at ``paths`` have their tensors."""
        put: list[tuple[Any, str, nn.Parameter]] = []
        with self.checkpoint.opened():
            try:
                for name in [name for path in paths for name in self._names(path)]:
                    owner, _, leaf = name.rpartition(".")
                    module: Any = self.model.get_submodule(owner)
                    empty = module._parameters[leaf]
                    put.append((module, leaf, empty))
                    tensor = self.read_as(name, empty.dtype)
                    module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
                yield
            finally:
                for module, leaf, empty in put:
                    module._parameters[leaf] = empty

    def _names(self, path: str) -> list[str]:
        module = self.model.get_submodule(path)
        return [name for name, _ in module.named_parameters(path, remove_duplicate=False)]


def _empty(args: EngineArgs, config: PretrainedConfig, device: torch.device) -> PreTrainedModel:
    options: dict[str, Any] = {
        "trust_remote_code": args.trust_remote_code,
        "dtype": resolve_dtype(args, config, device),
    }
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        try:
            model: PreTrainedModel = make(config, attn_implementation=ATTENTION, **options)
        except KeyError as error:  # it looks for a class of its own by this name
            if error.args != (ATTENTION,):
                raise
            model = make(config, attn_implementation="eager", **options)
    return model
