"""Weights of 16 bits that stay as the checkpoint has them until they are packed.

On a CPU a model computes in float32, which holds every number of a 16-bit checkpoint. As a whole it
would take twice the checkpoint's memory before one matrix is packed. So its large weights stay
16-bit numbers, most of them in the mapped file, and a function that reads one gets float32 numbers
for as long as it runs. A weight that is packed gives up its own memory, and is read back out of the
packed matrix if somebody still wants it. Weights that are dequantized while they are loaded have 32
bits, and give up their memory likewise. Those of a tower of images stay in 16 bits for good: a
product over all patches of an image takes far longer than to widen them.
"""

import ctypes
import mmap
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rayfin.actors.model_files.shards import Shards
from rayfin.actors.runner.models.inspect_layers import clamped_gate, is_experts
from rayfin.actors.runner.models.unmerged_experts import PARTS, Parts, kept_apart
from rayfin.actors.runner.quantized.loader import Quantizer, stored_tensors
from rayfin.kernels.cpu.kernels import Matrix, Pack

NARROW = (torch.bfloat16, torch.float16)
FLOATS = (*NARROW, torch.float32, torch.float64)

BLOCK = 1 << 20
"""Numbers that a product widens at once: few enough for a core's cache."""

Place = tuple[Matrix, int]
"""A packed matrix, and the first output there."""


class NarrowWeight(torch.Tensor):
    """A float32 parameter whose numbers are ``stored``, most often in 16 bits.

    It has the shape and dtype that it looks like. Functions of torch get a float32 copy of what
    they read. Nothing may write it.

    Args:
        stored: [N, K], or [E, N, K] of experts, which may lie apart.
        mapped: they lie in a mapped file, unchanged.
    """

    _is_param = True  # what torch.nn tells a parameter by

    @staticmethod
    def __new__(cls, stored: torch.Tensor | Parts, mapped: bool) -> "NarrowWeight":
        shown = torch.empty(1, dtype=torch.float32).expand(stored.shape)
        narrow: NarrowWeight = torch.Tensor._make_subclass(cls, shown, False)
        return narrow

    def __init__(self, stored: torch.Tensor | Parts, mapped: bool) -> None:
        self._stored: torch.Tensor | Parts | None = stored
        self._mapped = mapped
        self._places: list[Place] = []  # one, or one for each expert
        self._turned: Callable[[torch.Tensor], torch.Tensor] | None = None
        if mapped:
            _advise(stored, mmap.MADV_WILLNEED)

    def numbers(self) -> torch.Tensor:
        """Its numbers, as they are stored; float32 where they are packed already."""
        if isinstance(self._stored, Parts):
            return self._stored.merged()
        if self._stored is not None:
            return self._stored
        outputs = self.shape[-2 if self._turned is None else -1]
        rows = [matrix.rows(torch.arange(at, at + outputs)) for matrix, at in self._places]
        whole = rows[0] if self.dim() == 2 else torch.stack(rows)
        return whole if self._turned is None else self._turned(whole)

    def part(self, index: Any) -> torch.Tensor:
        """The numbers at ``index``, as they are stored; of one expert no other is read."""
        if isinstance(self._stored, Parts):
            return self._stored[index]
        return self.numbers()[index]

    def wide(self) -> torch.Tensor:
        """A float32 copy."""
        return self.numbers().float()

    def rest_in(
        self,
        places: list[Place],
        turned: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Gives up its memory: the same numbers lie at these places, perhaps to be ``turned``."""
        if self._mapped and self._stored is not None:
            _advise(self._stored, mmap.MADV_DONTNEED)  # read again from the file if need be
        elif all(_is_exact(matrix) for matrix, _ in places):
            self._stored, self._places, self._turned = None, places, turned

    @property
    def is_narrow(self) -> bool:
        """Whether its numbers are stored in 16 bits, and not packed."""
        return self._stored is not None and self._stored.dtype in NARROW

    def leave_file(self) -> None:
        """Copies its numbers out of the mapped file, which may be changed or go."""
        if self._mapped and self._stored is not None:
            mapped, self._stored, self._mapped = self._stored, self.numbers().clone(), False
            _advise(mapped, mmap.MADV_DONTNEED)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """``func`` of float32 numbers; no numbers are read for a shape."""
        kwargs = kwargs or {}
        if func in _OF_SHAPES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _FEW_AT_ONCE and len(args) > 1 and not kwargs.get("max_norm"):
            return _FEW_AT_ONCE[func](*args, **kwargs)
        if _writes(func) and args and isinstance(args[0], NarrowWeight):
            raise RuntimeError("a weight that stays in 16 bits is not written")
        return func(*_widened(list(args)), **{name: _widened(kwargs[name]) for name in kwargs})


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[..., K] -> [..., N]: one block of the outputs after the other."""
    x, numbers = _widened(input), stored(weight)
    step = max(1, BLOCK // numbers.shape[1])
    if len(numbers) <= step:
        return functional.linear(x, numbers.float(), bias)
    out: torch.Tensor = x.new_empty(*x.shape[:-1], len(numbers))
    for first in range(0, len(numbers), step):
        part = slice(first, first + step)
        part_bias = None if bias is None else bias[part]
        out[..., part] = functional.linear(x, numbers[part].float(), part_bias)
    return out


def _embedding(input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """[...] int64 -> [..., K]: the other arguments are of training."""
    return functional.embedding(input, stored(weight)).float()


def _item(weight: torch.Tensor, index: Any) -> torch.Tensor:
    numbers = weight.part(index) if isinstance(weight, NarrowWeight) else weight[index]
    return numbers.float()


_FEW_AT_ONCE: dict[Any, Callable[..., torch.Tensor]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    torch.Tensor.__getitem__: _item,
}
"""Functions that do not need all numbers at the same time."""

_FIELDS = (
    *("shape", "dtype", "device", "ndim", "layout", "nbytes", "requires_grad", "is_leaf", "grad"),
    *("is_meta", "is_cuda", "is_sparse", "is_quantized"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "__len__", "data_ptr", "element_size"),
    *("is_floating_point", "is_complex", "requires_grad_"),
)
_OF_SHAPES: set[Any] = {
    *(getattr(torch.Tensor, name).__get__ for name in _FIELDS),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
}
"""Functions that read no numbers. A data pointer is an identity: tied weights have the same."""

_WRITES = {"__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


def _writes(func: Callable[..., Any]) -> bool:
    name: str = getattr(func, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _widened(value: Any) -> Any:
    if isinstance(value, NarrowWeight):
        return value.wide()
    return [_widened(one) for one in value] if type(value) in (list, tuple) else value


def stored(weight: torch.Tensor) -> torch.Tensor:
    """The numbers of a weight to pack, in 16 bits where it is narrow."""
    return weight.numbers() if isinstance(weight, NarrowWeight) else weight


def packed(pack: Pack, weights: Sequence[torch.Tensor], *, paired: bool = False) -> Matrix:
    """``pack`` of the weights, which need no memory of their own from then on if it is exact."""
    matrix = pack([stored(weight) for weight in weights], paired=paired)
    first = 0
    for weight in weights:
        if isinstance(weight, NarrowWeight):
            weight.rest_in([(matrix, first)])
        first += len(weight)
    return matrix


def rest_in_each(
    weight: torch.Tensor,
    matrices: Sequence[Matrix],
    turned: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """The same for the weights of experts, which lie in a matrix each.

    Args:
        turned: makes the weights, which are [E, K, N], of the matrices' outputs [E, N, K].
    """
    if isinstance(weight, NarrowWeight):
        weight.rest_in([(matrix, 0) for matrix in matrices], turned)


def _is_exact(matrix: Matrix) -> bool:
    return type(matrix) is Matrix


@contextmanager
def narrow_loads(wanted: bool) -> Iterator[set[str]]:
    """Within it transformers loads each tensor from the file that the checkpoint's index names.

    If ``wanted`` it loads large weights of float32 models as the checkpoint has them. Gives their
    names, for ``hold_narrow`` as the next step.
    """
    names: set[str] = set()
    # transformers takes a tensor of several files from the last one. It reads each in the dtype
    # that its parameter has before, and has no setting for single ones. A model of 16 bits is no
    # way: its buffers would be rounded.
    owner: Any = PreTrainedModel
    real, here = owner._load_pretrained_model, threading.get_ident()

    def load(model: Any, state_dict: Any, files: Any, load_config: Any, **more: Any) -> Any:
        quantizer = load_config.hf_quantizer
        known = quantizer is None or isinstance(quantizer, Quantizer)
        mine = state_dict is None and threading.get_ident() == here
        if mine and wanted and known and load_config.dtype == torch.float32:
            names.update(_narrow(model, files, quantized=quantizer is not None))
            mapping = load_config.weight_mapping or ()
            load_config = replace(load_config, weight_mapping=kept_apart(mapping, NARROW))
        with ExitStack() as opened:
            state_dict = _without_copies(files or (), opened) if mine else state_dict
            return real(model, state_dict, files, load_config, **more)

    owner._load_pretrained_model = staticmethod(load)
    try:
        yield names
    finally:
        owner._load_pretrained_model = staticmethod(real)


def _without_copies(files: Sequence[str], opened: ExitStack) -> dict[str, Any] | None:
    """The checkpoint's tensors, still in their files, if some are copies that do not count."""
    if not all(file.endswith(".safetensors") for file in files):
        return None
    shards, tensors, copies = Shards(files), dict[str, Any](), False
    for path in files:
        file = opened.enter_context(safe_open(path, framework="pt"))
        for name in file.keys():
            if shards.counts(name, path):
                tensors[name] = file.get_slice(name)
            else:
                copies = True
    return tensors if copies else None


def _narrow(model: nn.Module, files: Sequence[str] | None, *, quantized: bool) -> Iterator[str]:
    """Gives parameters of known modules, which have no memory yet, the dtype of the checkpoint.

    The experts of a quantized checkpoint are dequantized, and keep theirs.
    """
    dtype, wide = _dtype_of([Path(file) for file in files or ()])
    if not wide <= {name for name, _ in model.named_parameters()}:
        dtype = None  # they may become a part of any parameter
    for path, module in model.named_modules():
        if quantized and _is_mixture(module):
            yield from (f"{path}.{name}" for name in module._parameters)
            continue
        if dtype not in NARROW:
            continue
        for name, weight in list(module._parameters.items()) if _is_known(module) else ():
            if weight is None or f"{path}.{name}" in wide:
                continue
            if weight.is_meta and weight.dim() > 1 and weight.dtype == torch.float32:
                empty = torch.empty(weight.shape, dtype=dtype, device="meta")
                module._parameters[name] = nn.Parameter(empty, requires_grad=weight.requires_grad)
                yield f"{path}.{name}"


def _is_known(module: nn.Module) -> bool:
    """Whether its weights are packed, or rows of them are picked."""
    plain = type(module) in (nn.Linear, Conv1D) or isinstance(module, nn.Embedding)
    return plain or _is_mixture(module)


def _is_mixture(module: nn.Module) -> bool:
    return is_experts(module) or clamped_gate(module) is not None


def _dtype_of(files: Sequence[Path]) -> tuple[torch.dtype | None, set[str]]:
    """Returns the one dtype of a checkpoint's plain matrices, and those that are float32 beside it.

    The dtype is None where there are several. Gates of experts are float32 beside 16 bits.
    """
    if any(file.suffix != ".safetensors" for file in files):
        return None, set()
    names: dict[torch.dtype | None, set[str]] = {}
    for place, (dtype, shape) in stored_tensors(files):
        if len(shape) > 1 and not _of_codes(place.key) and dtype in {*FLOATS, None}:
            names.setdefault(dtype, set()).add(place.key)
    wide = names.pop(torch.float32, set()) if len(names) > 1 else set()
    return (next(iter(names)) if len(names) == 1 else None), wide


def _of_codes(name: str) -> bool:
    """Whether a tensor belongs to the codes of a quantized layer."""
    leaf = name.rpartition(".")[2]
    return any(word in leaf for word in ("scale", "absmax"))


def hold_narrow(model: nn.Module, names: Iterable[str]) -> None:
    """Makes each of these parameters a ``NarrowWeight``; packing one frees its memory."""
    plain = [model.get_parameter(name) for name in names]
    ranges = _unchanged_files() if plain else []
    held: dict[int, NarrowWeight] = {}  # tied weights stay one
    for weight in plain:
        if id(weight) not in held and weight.dtype in (*NARROW, torch.float32):
            numbers: torch.Tensor | Parts = getattr(weight, PARTS, None) or weight.detach()
            mapped = all(_is_within(tensor, ranges) for tensor in _tensors(numbers))
            held[id(weight)] = NarrowWeight(numbers, mapped)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in held:
                module._parameters[name] = held[id(parameter)]  # type: ignore[assignment]


def hold_dense(layers: Iterable[nn.Linear]) -> None:
    """Makes layers of float32, which no file holds, give up their weights once they are packed."""
    for layer in layers:
        if layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu":
            held: Any = NarrowWeight(layer.weight.detach(), mapped=False)
            layer._parameters["weight"] = held


def widen(model: nn.Module, but: nn.Module | None = None) -> None:
    """Makes the weights that are narrow still plain float32 parameters, one after the other.

    Args:
        but: a part whose modules keep theirs.
    """
    left = set() if but is None else set(but.modules())
    wide: dict[int, nn.Parameter] = {}  # by the narrow one
    for module in (one for one in model.modules() if one not in left):
        for name, parameter in module._parameters.items():
            if isinstance(parameter, NarrowWeight):
                if id(parameter) not in wide:
                    wide[id(parameter)] = nn.Parameter(parameter.wide(), requires_grad=False)
                module._parameters[name] = wide[id(parameter)]


def keep_narrow(model: nn.Module, but: nn.Module) -> None:
    """Makes the weights that are narrow stay so for good, in memory of their own.

    Their products widen them by blocks. Those whose numbers have 32 bits become plain parameters.

    Args:
        but: a part whose weights are left as they are.
    """
    others = {id(parameter) for parameter in but.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, NarrowWeight) or id(parameter) in others:
                continue
            if parameter.is_narrow:
                parameter.leave_file()
            else:
                module._parameters[name] = nn.Parameter(parameter.wide(), requires_grad=False)


_VMA = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ [0-9a-f]+ \S+ (\d+)")


def _unchanged_files() -> list[tuple[int, int]]:
    """Address ranges of mapped files of which this process has changed no page; Linux has them."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return []
    ranges: list[tuple[int, int]] = []
    current: tuple[int, int] | None = None
    for line in lines:
        if match := _VMA.match(line):
            of_file = int(match[3]) != 0  # its inode
            current = (int(match[1], 16), int(match[2], 16)) if of_file else None
        elif current and line.startswith("Anonymous:") and line.split()[1] == "0":
            ranges.append(current)
    return ranges


def _tensors(numbers: torch.Tensor | Parts) -> Iterator[torch.Tensor]:
    if isinstance(numbers, Parts):
        yield from numbers.each()
    else:
        yield numbers


def _is_within(tensor: torch.Tensor, ranges: Iterable[tuple[int, int]]) -> bool:
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return any(first <= start and end <= last for first, last in ranges)


def _advise(numbers: torch.Tensor | Parts, advice: int) -> None:
    """Tells Linux what to do with the pages that a tensor of ``numbers`` alone lies on."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None)
    for tensor in _tensors(numbers):
        begin = tensor.data_ptr()
        start, end = -(-begin // page) * page, (begin + tensor.nbytes) // page * page
        if start < end:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
