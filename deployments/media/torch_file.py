"""Reads the file of ``torch.save`` with one plain tensor, without torch and without unpickling.

Such a file is a zip archive: a pickle that says how the tensor lies in its storage, and the bytes
of the storage. ``torch.load`` has had ways to run code and to write outside of its memory, by
sparse tensors whose indices were not checked, for one. So nothing is run here. The few pickle
opcodes of a plain tensor are followed by hand over a stack of plain values, a call is one of two
names, any other opcode or name is refused, and the tensor has to lie inside of the bytes that came.
"""

import io
import pickletools
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.media.embeds_tensor import DTYPES, Tensor, refused

MAX_PICKLE = 4096  # bytes; that of a tensor has some two hundred
MAX_MEMBERS = 64  # files in the archive; torch writes seven
MAX_DIMENSIONS = 8
STORAGES = {
    "torch DoubleStorage": "float64",
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
}
TENSOR, PARAMETER = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"
HOOKS = "collections OrderedDict"
BROKEN = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError),
    *(struct.error, OverflowError, KeyError, IndexError),
)
"""What zipfile raises over bytes that are no archive."""

WHAT = "save one dense tensor of floating-point numbers with torch.save"


@dataclass(frozen=True, slots=True)
class _Name:
    """A global that the pickle names."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    name: str  # of its file
    dtype: str
    length: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a tensor lies in its storage, unchecked."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


class _Mark:
    """Where a tuple begins on the stack."""


def read_torch(data: bytes) -> Tensor:
    """The tensor of a file; its array is a view of the bytes.

    Raises:
        InvalidRequest: it is another file, or not one plain tensor.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read(archive)
    except BROKEN as error:
        raise refused(f"the archive is broken ({type(error).__name__})") from None


def _read(archive: zipfile.ZipFile) -> Tensor:
    members = {}
    for info in archive.infolist():
        _, _, name = info.filename.partition("/")
        if info.compress_type != zipfile.ZIP_STORED:
            raise refused("the archive is compressed, which torch.save does not do")
        members[name] = info
        if len(members) > MAX_MEMBERS:
            raise refused(f"the archive has over {MAX_MEMBERS} files")
    if "data.pkl" not in members or members["data.pkl"].file_size > MAX_PICKLE:
        raise refused(f"the archive has no pickle of one tensor: {WHAT}")
    if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
        raise refused("its byte order is not little endian")
    plan = _follow(archive.read(members["data.pkl"]))
    storage = plan.storage
    if not isinstance(storage, _Storage):
        raise _unknown("a tensor without a storage")
    if f"data/{storage.name}" not in members:
        raise refused("its storage is not in the archive")
    numbers = np.frombuffer(archive.read(members[f"data/{storage.name}"]), DTYPES[storage.dtype])
    if len(numbers) != storage.length:
        raise refused(f"its storage has {len(numbers)} numbers instead of {storage.length}")
    return Tensor(_placed(numbers, plan), storage.dtype)


def _placed(numbers: np.ndarray, plan: _Plan) -> np.ndarray:
    """The tensor in its storage; every place that it can reach is checked to be inside."""
    shape, strides = plan.shape, plan.strides
    for sizes in (shape, strides, (plan.offset,)):
        if not isinstance(sizes, tuple) or any(type(size) is not int or size < 0 for size in sizes):
            raise _unknown("sizes that are no numbers")
    if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise refused("its shape and its strides do not match")
    last = plan.offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 in shape:
        raise refused("it is empty")
    if last >= len(numbers):
        raise refused("it reaches beyond its storage")
    bytes_of = numbers.dtype.itemsize
    try:
        return np.lib.stride_tricks.as_strided(
            numbers[plan.offset :], shape, [step * bytes_of for step in strides], writeable=False
        )
    except (ValueError, OverflowError):  # strides of 0, and no end of numbers
        raise refused("it has too many numbers") from None


def _follow(pickle: bytes) -> _Plan:
    """What a pickle describes, if that is one tensor."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            name = opcode.name
            if name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "REDUCE":
                arguments = stack.pop()
                stack.append(_call(stack.pop(), arguments))
            elif name == "BINPERSID":
                stack.append(_storage(stack.pop()))
            elif name != "PROTO" and name != "STOP":
                _push(stack, name, argument)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError):
        raise refused(f"its pickle is broken: {WHAT}") from None
    if len(stack) != 1 or not isinstance(stack[0], _Plan):
        raise _unknown("something else than one tensor")
    return stack[0]


def _push(stack: list[Any], name: str, argument: Any) -> None:
    """A value, or a tuple of the last ones."""
    if name == "MARK":
        stack.append(_Mark)
    elif name in ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
        stack.append(argument)
    elif name in ("NEWTRUE", "NEWFALSE"):
        stack.append(name == "NEWTRUE")
    elif name == "GLOBAL":
        stack.append(_Name(argument))
    elif name == "EMPTY_TUPLE":
        stack.append(())
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]
    elif name == "TUPLE":
        start = len(stack) - 1 - stack[::-1].index(_Mark)
        stack[start:] = [tuple(stack[start + 1 :])]
    else:
        raise _unknown(f"the opcode {name}")


def _call(function: Any, arguments: Any) -> Any:
    named = function.name if isinstance(function, _Name) else ""
    if isinstance(arguments, tuple):
        if named == TENSOR and len(arguments) in (6, 7):
            return _Plan(*arguments[:4])
        if named == PARAMETER and len(arguments) == 3 and isinstance(arguments[0], _Plan):
            return arguments[0]
        if named == HOOKS and not arguments:
            return ()
    raise _unknown(f"a call of {named}" if named else "a call of no name")


def _storage(persistent: Any) -> _Storage:
    """Torch's reference to a storage: ("storage", its type, its file, a device, its length)."""
    if not isinstance(persistent, tuple) or len(persistent) != 5 or persistent[0] != "storage":
        raise _unknown("a reference to no storage")
    _, kind, name, _, length = persistent
    dtype = STORAGES.get(kind.name) if isinstance(kind, _Name) else None
    if dtype is None:
        shown = kind.name if isinstance(kind, _Name) else "its storage"
        raise refused(
            f"{shown[:64]} is not of {', '.join(DTYPES)}: quantized and integer tensors are refused"
        )
    if type(name) is not str or type(length) is not int:
        raise _unknown("a reference to no storage")
    return _Storage(name, dtype, length)


def _unknown(part: str) -> InvalidRequest:
    return refused(f"its pickle holds {part[:96]}: {WHAT}")
