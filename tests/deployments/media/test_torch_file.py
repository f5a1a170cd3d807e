"""Files of ``torch.save`` are read as torch reads them, and whatever else one holds is refused."""

import io
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.media.embeds_tensor import DTYPES, Tensor
from rayfin.deployments.media.torch_file import MAX_PICKLE, read_torch


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def changed(data: bytes, members: dict[str, bytes | None], **options: Any) -> bytes:
    """The archive with other members; None drops one."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", **options) as new:
        kept = {info.filename: old.read(info) for info in old.infolist()}
        kept |= {f"archive/{name}": content for name, content in members.items()}  # type: ignore[misc]
        for name, content in kept.items():
            if content is not None:
                new.writestr(name, content)
    return file.getvalue()


def pickle_of(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("archive/data.pkl")


def as_torch(tensor: Tensor) -> torch.Tensor:
    rows = torch.from_numpy(np.array(tensor.array))
    return rows.view(torch.bfloat16) if tensor.dtype == "bfloat16" else rows


PLAIN = torch.arange(12, dtype=torch.float32).reshape(3, 4)
VIEWS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.T,
    "part": lambda t: t[1:, 1:3],
    "steps": lambda t: t[::2],
    "expanded": lambda t: t[:1].expand(5, 4),
    "batch of one": lambda t: t.unsqueeze(0),
    "scalar": lambda t: t[0, 0],
    "gradient": lambda t: t.clone().requires_grad_(),
    "parameter": lambda t: torch.nn.Parameter(t),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_tensors_are_read_as_torch_reads_them(view: str, dtype: str) -> None:
    tensor = VIEWS[view](PLAIN.to(getattr(torch, dtype)))
    read = read_torch(saved(tensor))
    assert read.dtype == dtype
    assert torch.equal(as_torch(read), tensor.detach())


def _pickled(build: Any) -> bytes:
    return pickle.dumps(build, protocol=2)


class Calls:
    """Pickles to a call of ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


OTHERS: dict[str, Callable[[], Any]] = {
    "a list": lambda: [PLAIN],
    "a dictionary": lambda: {"prompt_embeds": PLAIN},
    "text": lambda: "prompt_embeds",
    "sparse": lambda: PLAIN.to_sparse(),
    "sparse rows": lambda: PLAIN.to_sparse_csr(),
    "integers": lambda: torch.arange(4).reshape(2, 2),
    "complex": lambda: torch.zeros(2, 2, dtype=torch.complex64),
    "8 bits": lambda: torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
    "boolean": lambda: torch.zeros(2, 2, dtype=torch.bool),
    "quantized": lambda: torch.quantize_per_tensor(PLAIN, 0.1, 0, torch.quint8),
    "meta": lambda: torch.zeros(2, 2, device="meta"),
    "a storage": lambda: PLAIN.untyped_storage(),
    "a size": lambda: PLAIN.shape,
    "empty": lambda: PLAIN[:0],
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_torch(saved(OTHERS[name]()))
    assert caught.value.param == "prompt_embeds" and caught.value.code == "invalid_embeds"


def test_nothing_is_called(tmp_path: Any) -> None:
    """Not even what torch's own restricted unpickler would call."""
    good = saved(PLAIN)
    target = tmp_path / "made"
    for function, arguments in (
        (open, (str(target), "w")),
        (exec, (f"open({str(target)!r}, 'w')",)),
        (OrderedDict, ([(1, 2)],)),
        (torch._utils._rebuild_device_tensor_from_numpy, ()),
    ):
        with pytest.raises(InvalidRequest, match="a call of|opcode"):
            read_torch(changed(good, {"data.pkl": _pickled(Calls(function, *arguments))}))
    assert not target.exists()


def rewritten(data: bytes, size: bytes, other: bytes) -> bytes:
    """The archive with other numbers in its pickle."""
    old = pickle_of(data)
    assert old.count(size) == 1
    return changed(data, {"data.pkl": old.replace(size, other)})


SHAPE = b"K\x03K\x04\x86"  # (3, 4)
STRIDES = b"K\x04K\x01\x86"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SHAPE, b"K\x04K\x04\x86"),  # a row more than there is
        (SHAPE, b"K\x03K\x05\x86"),
        (SHAPE, b"J\xff\xff\xff\x7fK\x04\x86"),
        (SHAPE, b"J\xff\xff\xff\xffK\x04\x86"),  # -1
        (SHAPE, b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01K\x04\x86"),  # 2 ** 64
        (SHAPE, b"K\x0c\x85"),  # another number of dimensions
        (SHAPE, b"K\x03X\x01\x00\x00\x004\x86"),  # a text
        (SHAPE, b"K\x03\x88\x86"),  # a truth value
        (STRIDES, b"K\x05K\x01\x86"),
        (STRIDES, b"J\xfc\xff\xff\xffK\x01\x86"),  # -4
        (b"QK\x00", b"QK\x01"),  # an offset
        (b"QK\x00", b"QJ\xff\xff\xff\xff"),
        (b"cpuq\x04K\x0c", b"cpuq\x04K\x0d"),  # the length of the storage
        (b"cpuq\x04K\x0c", b"cpuq\x04K\x0b"),
        (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001"),  # the file of the storage
        (b"X\x07\x00\x00\x00storage", b"X\x07\x00\x00\x00module_"),
        (b"ctorch\nFloatStorage\n", b"ctorch\nDoubleStorage\n"),
        (b"ctorch\nFloatStorage\n", b"ctorch\nfloat32\n"),
        (b".", b""),
        (b".", b"0."),
        (b".", b"q\x0b\x86."),
    ],
)
def test_sizes_that_do_not_fit(old: bytes, new: bytes) -> None:
    data = saved(PLAIN)
    if old == b".":
        data = changed(data, {"data.pkl": pickle_of(data)[:-1] + new})
    else:
        data = rewritten(data, old, new)
    with pytest.raises(InvalidRequest):
        read_torch(data)


def test_no_end_of_numbers() -> None:
    """Strides of 0 cost nothing in a file; the reader makes a view, and copies nothing."""
    data = rewritten(saved(PLAIN), STRIDES, b"K\x00K\x00\x86")
    huge = rewritten(data, SHAPE, b"J\xff\xff\xff\x7fK\x04\x86")
    assert read_torch(huge).array.shape == (2**31 - 1, 4)
    endless = b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x70" * 2 + b"\x86"
    with pytest.raises(InvalidRequest):
        read_torch(rewritten(data, SHAPE, endless))


def test_archives() -> None:
    good = saved(PLAIN)
    for data in (
        changed(good, {}, compression=zipfile.ZIP_DEFLATED),
        changed(good, {"data.pkl": None}),
        changed(good, {"data/0": None}),
        changed(good, {"data/0": b"\0" * 47}),
        changed(good, {"byteorder": b"big"}),
        changed(good, {"data.pkl": b"\x80\x02" + b"N" * MAX_PICKLE + b"."}),
        changed(good, {f"more/{i}": b"" for i in range(100)}),
        good[:-10],
        good[: len(good) // 2],
        b"PK\x03\x04",
        saved(PLAIN, _use_new_zipfile_serialization=False),
    ):
        with pytest.raises(InvalidRequest):
            read_torch(data)


def test_broken_bytes_raise_one_kind_of_error() -> None:
    """Each byte of the pickle and of the archive's frame, changed in turn."""
    good = saved(PLAIN)
    plain = pickle_of(good)
    assert {op.name for op, _, _ in pickletools.genops(plain)} >= {"BINPERSID", "REDUCE"}
    rng = np.random.default_rng(0)
    for place in range(len(plain)):
        broken = bytearray(plain)
        broken[place] ^= int(rng.integers(1, 256))
        _read_or_refuse(changed(good, {"data.pkl": bytes(broken)}))
    for place in range(0, len(good), 3):
        broken = bytearray(good)
        broken[place] ^= int(rng.integers(1, 256))
        _read_or_refuse(bytes(broken))
    for place in range(len(good) - 120, len(good) - 8):  # sizes and offsets of the directory
        broken = bytearray(good)
        broken[place : place + 8] = struct.pack("<q", -1)
        _read_or_refuse(bytes(broken))


def _read_or_refuse(data: bytes) -> None:
    try:
        array = read_torch(data).array
    except InvalidRequest:
        return
    assert array.nbytes < 10**6 or 0 in array.strides
