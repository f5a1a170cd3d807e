"""Loads a rank's share of a model from safetensors slices, without reading the whole files."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.shards import (
    INDEX,
    SINGLE,
    Shards,
    place_in_index,
    read_index,
    require_safetensors,
)
from rayfin.actors.runner.models.config import why_not_loaded
from rayfin.actors.runner.models.dtypes import resolve_dtype
from rayfin.actors.runner.models.weights import dispatch_refused, require_pageable
from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.parallel.plans import (
    AnyCut,
    Cuts,
    ExpertsSlice,
    MergedSlice,
    Read,
    TransposedSlice,
    WeightSlice,
    read_experts,
    stored_name,
)
from rayfin.actors.runner.parallel.shard_codes import place_codes, widen_small_groups
from rayfin.actors.runner.parallel.shard_model import check_sizes, checkpoint_name, shard_model
from rayfin.actors.runner.quantized.experts import StoredLayer
from rayfin.actors.runner.quantized.formats import Part, refuse
from rayfin.actors.runner.quantized.loader import dequantize, quantizer_of


class Checkpoint:
    """The tensors of safetensors ``files`` of a ``model``, opened on demand.

    Names may lack the decoder's ``prefix``, since some models were saved without a head (GPT-2).
    """

    def __init__(self, model: str, files: Sequence[Path], prefix: str) -> None:
        self.model = model
        self._prefix = f"{prefix}."
        self._files: dict[str, Path] = {}
        self._opened: dict[Path, Any] | None = None
        self.tables: dict[str, StoredLayer] = {}  # embeddings in codes, by their names in the model
        shards = Shards(files)
        for path in files:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if shards.counts(name, path)]
                self._files |= dict.fromkeys(names, path)

    @classmethod
    def of(cls, args: EngineArgs, prefix: str) -> "Checkpoint":
        """The checkpoint that ``args`` name.

        Raises:
            InvalidConfig: There are no such files.
            OSError: A file of the hub cannot be loaded.
        """
        require_safetensors(args.model)
        return cls(args.model, _files(args), prefix)

    @property
    def files(self) -> list[Path]:
        """Its files, in order."""
        return sorted(set(self._files.values()))

    @property
    def names(self) -> set[str]:
        """Of its tensors, as they are stored."""
        return set(self._files)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keeps each file open that is read within, and mapped as far as it is read."""
        with ExitStack() as stack:
            self._opened, self._stack = {}, stack
            try:
                yield
            finally:
                self._opened = None

    @contextmanager
    def _open(self, path: Path) -> Iterator[Any]:
        if self._opened is None:
            with safe_open(path, framework="pt") as file:
                yield file
            return
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        yield self._opened[path]

    def __contains__(self, name: str) -> bool:
        return self.stored(name) in self._files or self._table(name) is not None

    def _table(self, name: str) -> StoredLayer | None:
        return self.tables.get(name.removesuffix(".weight"))

    def stored(self, name: str) -> str:
        """The name under which a tensor is stored."""
        return name if name in self._files else name.removeprefix(self._prefix)

    def read(self, name: str, shape: torch.Size, cut: WeightSlice | None) -> torch.Tensor:
        """Reads the tensor ``name`` or a part of it, whose shape is ``shape``.

        Raises:
            InvalidConfig: It is missing, or has another shape.
        """
        if name not in self:
            place = place_in_index(self.model, name)
            raise InvalidConfig(f"{self.model} lacks the weight {name}{place}", "model")
        if (table := self._table(name)) is not None:
            return _filled_up(_rows(table, cut), shape)
        expected, stored_as = list(shape), self.stored(name)
        if cut is not None:
            expected[cut.dim] = cut.whole
        with self._open(self._files[stored_as]) as file:
            stored = file.get_slice(stored_as)
            if stored.get_shape() != expected:
                raise InvalidConfig(
                    f"{self.model} holds {name} of shape {stored.get_shape()}, its config "
                    f"wants {expected}",
                    "model",
                )
            if cut is None:
                whole: torch.Tensor = file.get_tensor(stored_as)
                return whole
            stop = min(cut.stop, cut.whole)
            start = min(cut.start, stop)
            part = stored[(slice(None),) * cut.dim + (slice(start, stop),)]
        return _filled_up(part, shape)


def load_share(
    args: EngineArgs,
    config: PretrainedConfig,
    device: torch.device,
    attention: str,
    peers: ProcessGroups,
    *,
    keep_quantized: bool = False,
) -> PreTrainedModel:
    """Loads this rank's share of the model that ``load_model`` would load.

    With ``keep_quantized`` layers and experts that are stored in codes stay in the files, until the
    caller packs them.

    ``load_format="dummy"`` draws each weight from ``seed`` and its name, so weights differ from
    those of a single device.

    Raises:
        InvalidConfig: Sizes are not divisible; weights are missing, broken or of other shapes.
        UnsupportedModel: The architecture cannot be sharded or paged.
    """
    check_sizes(config, peers.place)
    is_dummy = args.load_format == "dummy"
    quantizer = quantizer_of(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config,
                trust_remote_code=args.trust_remote_code,
                dtype=resolve_dtype(args, config, device),
                attn_implementation=attention,
            )
    except KeyError as error:
        raise dispatch_refused(config, attention, error) from None
    require_pageable(model)
    ties = model.all_tied_weights_keys
    try:
        checkpoint = None if is_dummy else Checkpoint.of(args, model.base_model_prefix)
        stored = None
        if checkpoint and quantizer:
            stored = quantizer.stored(model, checkpoint.files, device)
            checkpoint.tables = stored.tables
        cuts = shard_model(model, peers)
        make_buffers(model, device)
        if stored is not None:
            place_codes(model, cuts, stored, peers)
            model.hf_quantizer = quantizer  # type: ignore[assignment]
        if checkpoint is None:
            _draw(model, cuts, args.seed, device)
        else:
            _read(model, cuts, checkpoint, ties, device)
        widen_small_groups(model, peers.place.tensor_size)
        if not keep_quantized:
            dequantize(model)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidConfig(why_not_loaded(args.model, error), "model") from None
    served: PreTrainedModel = model.eval()  # type: ignore[no-untyped-call]
    return served.requires_grad_(False)


def _rows(table: StoredLayer, cut: WeightSlice | None) -> torch.Tensor:
    """The numbers of a table, or of a part of its rows."""
    if cut is None:
        return table.grouped().dense()
    assert cut.dim == 0
    stop = min(cut.stop, table.outputs)
    part = table.part(Part(0, range(min(cut.start, stop), stop)))
    assert part is not None
    return part.dense()


def _read(
    model: PreTrainedModel,
    cuts: Cuts,
    checkpoint: Checkpoint,
    ties: dict[str, str],
    device: torch.device,
) -> None:
    known = checkpoint.__contains__
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        source = checkpoint_name(name)
        cut = cuts.get(source)
        if source in ties and (ties[source] in checkpoint or source not in checkpoint):
            source = ties[source]
        tensor = assemble(source, parameter.shape, cut, known, checkpoint.read)
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise refuse(
                f"{checkpoint.model} holds {source} as {str(tensor.dtype).removeprefix('torch.')}, "
                "which tensor_parallel_size and pipeline_parallel_size do not take in this layer"
            )
        _set(model, name, tensor.to(device, parameter.dtype))
    exact = model._get_dtype_plan(model.dtype)  # some are always float32
    for name in saved_buffers(model):
        buffer = model.get_buffer(name)
        tensor = checkpoint.read(checkpoint_name(name), buffer.shape, None)
        dtype = next((exact[part] for part in exact if part in name), buffer.dtype)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = tensor.to(device, dtype)


def _draw(model: PreTrainedModel, cuts: Cuts, seed: int, device: torch.device) -> None:
    spread = getattr(model.config, "initializer_range", None) or 0.02

    def draw(source: str, shape: torch.Size, cut: WeightSlice | None) -> torch.Tensor:
        wanted = list(shape)
        if cut is not None:
            wanted[cut.dim] = cut.whole
        if len(wanted) > 1:
            generator = torch.Generator().manual_seed(seed ^ zlib.crc32(source.encode()))
            tensor = torch.empty(wanted).normal_(0.0, spread, generator=generator)
        else:
            tensor = torch.zeros(wanted) if source.endswith("bias") else torch.ones(wanted)
        if cut is None:
            return tensor
        stop = min(cut.stop, cut.whole)
        start = min(cut.start, stop)
        return _filled_up(tensor.narrow(cut.dim, start, stop - start), shape)

    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        source = checkpoint_name(name)
        tensor = assemble(source, parameter.shape, cuts.get(source), lambda _: False, draw)
        _set(model, name, tensor.to(device, parameter.dtype))


def assemble(
    source: str,
    shape: torch.Size,
    cut: AnyCut | None,
    known: Callable[[str], bool],
    read: Read,
) -> torch.Tensor:
    """Assembles a parameter of that shape from the parts that ``read`` returns."""
    if isinstance(cut, ExpertsSlice):
        return read_experts(source, shape, cut, known, read)
    if isinstance(cut, TransposedSlice):
        return assemble(source, torch.Size(reversed(shape)), cut.of, known, read).T
    name = stored_name(source, known)
    if not isinstance(cut, MergedSlice):
        return read(name, shape, cut)
    parts = []
    for part in cut.parts:
        sizes = list(shape)
        sizes[part.dim] = part.stop - part.start
        parts.append(read(name, torch.Size(sizes), part))
    return torch.cat(parts, dim=cut.parts[0].dim)


def saved_buffers(model: PreTrainedModel) -> list[str]:
    """The buffers that checkpoints hold, such as a router's corrections."""
    buffers = {name for name, _ in model.named_buffers()}
    return [name for name in model.state_dict() if name in buffers]


def _filled_up(part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Pads ``part`` with rows of zeros."""
    if part.shape == shape:
        return part
    whole = part.new_zeros(shape)
    whole[: len(part)] = part
    return whole


def _set(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    parameter = torch.nn.Parameter(tensor.contiguous(), requires_grad=False)
    setattr(model.get_submodule(owner), leaf, parameter)


def make_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Initializes buffers such as rotary frequencies with the model's code, like transformers."""
    for module in model.modules():
        buffers: dict[str, Any] = module._buffers
        if not buffers:
            continue
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = torch.empty_like(buffer, device=device)
        model._init_weights(module)  # type: ignore[no-untyped-call]


def _files(args: EngineArgs) -> list[Path]:
    def find(name: str) -> str | None:
        path: str | None = cached_file(
            args.model, name, _raise_exceptions_for_missing_entries=False, **args.hub
        )
        return path

    if single := find(SINGLE):  # first, as transformers does
        return [Path(single)]
    if index := find(INDEX):
        paths = {name: find(name) for name in set(read_index(Path(index).parent).values())}
        if missing := sorted(name for name, path in paths.items() if path is None):
            raise InvalidConfig(
                f"{INDEX} of {args.model} names {missing[0]}, which is not there", "model"
            )
        return sorted(Path(path) for path in paths.values() if path)
    return sorted(Path(args.model).glob("*.safetensors"))
