"""What Triton's interpreter accepts of kernels, and its compiler or a launch does not."""

import ast
import importlib
import inspect
import pkgutil
from typing import Any

import pytest

pytest.importorskip("triton")
from triton.backends.nvidia.compiler import CUDAOptions

from rayfin.kernels.triton import device as package

LAUNCH = {"grid", "warmup", "stream", "device", "device_type"}
"""Taken by ``JITFunction.run``, or refused by it."""


def kernels() -> dict[str, Any]:
    """Name -> function, of all that `triton.jit` has wrapped."""
    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        names = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
        found |= {name: each for name, each in names.items() if hasattr(each, "arg_names")}
    return found


def test_arguments_are_not_those_of_a_launch() -> None:
    reserved = LAUNCH | set(CUDAOptions.__dataclass_fields__)
    assert {"num_warps", "launch_pdl"} <= reserved and len(kernels()) > 15
    for name, kernel in kernels().items():
        assert not reserved & set(kernel.arg_names), name


def shared_variables(source: str) -> list[tuple[str, str]]:
    """Pairs of names that are one value before a loop which changes both.

    Triton 3.6 compiles them to one variable of the loop.
    """
    found = []
    for function in (
        each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)
    ):
        nodes = list(ast.walk(function))
        pairs = [
            (each.lineno, target.id, each.value.id)
            for each in nodes
            if isinstance(each, ast.Assign) and isinstance(each.value, ast.Name)
            for target in each.targets
            if isinstance(target, ast.Name)
        ]
        for loop in (each for each in nodes if isinstance(each, ast.For | ast.While)):
            changed = {
                each.id
                for each in ast.walk(loop)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
            found += [
                (one, other)
                for line, one, other in pairs
                if line < loop.lineno and {one, other} <= changed
            ]
    return found


def test_loops_change_no_value_under_two_names() -> None:
    assert shared_variables("def f(n):\n a = n\n b = a\n while n:\n  b = a\n  a += 1") == [
        ("b", "a")
    ]
    for module in pkgutil.iter_modules(package.__path__):
        code = inspect.getsource(importlib.import_module(f"{package.__name__}.{module.name}"))
        assert not shared_variables(code), module.name
