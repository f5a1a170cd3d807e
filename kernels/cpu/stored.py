"""A packed matrix as plain numbers and blocks of bytes, and a matrix over such blocks again.

The blocks are as the kernels of one instruction set read them, of one version of their sources
(``layout``): another process may map a file that holds them, and computes the same bits.
"""

from pathlib import Path
from typing import Any

import torch

from rayfin.kernels.cpu.codes import CodedMatrix, Codes
from rayfin.kernels.cpu.kernels import STORAGES, CpuKernels, Matrix, Parts
from rayfin.kernels.cpu.library import try_load

TYPES = {number: dtype for dtype, number in STORAGES.items()}


def layout() -> str | None:
    """The instruction set and the sources of the kernels in use; None without kernels."""
    library = try_load()
    if library is None:
        return None
    return f"{Path(library._name).name} {library.rayfin_sources().decode()}"


def describe(matrix: Matrix) -> dict[str, Any]:
    """All that ``restore`` needs beside the matrix's parts, as JSON."""
    sizes = {"outputs": matrix.outputs, "inputs": matrix.inputs, "paired": matrix.paired}
    if not isinstance(matrix, CodedMatrix):
        return {**sizes, "storage": STORAGES[matrix.storage]}
    return {
        **sizes,
        "codes": int(matrix.codes),
        "group": matrix.group,
        "zeros": matrix.zeros,
        "row_bytes": matrix.row_bytes,
        "span": matrix.span,
        "factors": matrix.factors,
        "order": None if matrix.order is None else matrix.order.tolist(),
        "table": None if matrix.table is None else matrix.table.tolist(),
    }


def restore(kernels: CpuKernels, described: dict[str, Any], parts: Parts) -> Matrix:
    """The matrix over ``parts``, which it keeps and never writes.

    Raises:
        ValueError: the parts are not of such a matrix.
    """
    values = dict(described)
    outputs, inputs, paired = (values.pop(name) for name in ("outputs", "inputs", "paired"))
    if "storage" in values:
        storage = TYPES[values["storage"]]
        matrix = Matrix(kernels.library, outputs, inputs, storage, paired, parts)
    else:
        order, table = values.pop("order"), values.pop("table")
        matrix = CodedMatrix(
            kernels,
            outputs,
            inputs,
            Codes(values.pop("codes")),
            paired=paired,
            order=None if order is None else torch.tensor(order),
            table=None if table is None else torch.tensor(table),
            parts=parts,
            **values,
        )
    if [part.size for part in matrix.parts()] != [part.size for part in parts]:
        raise ValueError(f"a weight of {outputs} x {inputs} has parts of other sizes")
    return matrix
