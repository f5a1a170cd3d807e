"""Triton's interpreter without work that changes nothing, for tests: results are the same bits.

Of each launch, and of each call of a function within a kernel, Triton 3.7 looks through all names
of ``triton.language`` for those that it replaces, which takes longer than most kernels of tests.
Here they are found once. It also copies the storage of each argument to itself, however large the
pages are, and makes a table of dtypes for each load.
"""

import inspect
import os
from types import ModuleType
from typing import Any

import torch

_MISSING = object()


class Names:
    """What the interpreter replaces while a kernel runs, and what was there before."""

    def __init__(self, interpreter: ModuleType, language: ModuleType) -> None:
        found: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}
        scope = interpreter._patch_lang(_Namespace(language))
        for owner, name, before in scope._changes:
            key = (id(owner), name)
            if key not in found:  # the first change has replaced the original
                found[key] = (owner, name, before, inspect.getattr_static(owner, name))
        scope.restore()
        missing = interpreter._MISSING
        self._changes = [
            (owner, name, _MISSING if before is missing else before, inside)
            for owner, name, before, inside in found.values()
        ]
        self.inside = False

    def replace(self) -> None:
        for owner, name, _, inside in self._changes:
            setattr(owner, name, inside)
        self.inside = True

    def restore(self) -> None:
        self.inside = False
        for owner, name, before, _ in self._changes:
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class _Namespace:
    """A function, as far as the interpreter looks at one: it sees all of the language."""

    def __init__(self, language: ModuleType) -> None:
        self.__globals__ = {"tl": language, "core": language.core}


def install() -> None:
    """Makes this process's interpreter quick, if it interprets: there is no GPU."""
    if os.environ.get("TRITON_INTERPRET") != "1" or torch.cuda.is_available():
        return
    try:
        import triton.language as language
        from triton.runtime import interpreter
    except ImportError:  # not every machine has it
        return
    if getattr(interpreter, "_rayfin_is_quick", False):
        return
    names = Names(interpreter, language)
    _replace_names_once(interpreter, names)
    _copy_nothing(interpreter)
    _look_dtypes_up(interpreter, language)
    interpreter._rayfin_is_quick = True


def _replace_names_once(interpreter: Any, names: Names) -> None:
    """Of a launch; functions that a kernel calls see what it sees."""
    patch = interpreter._patch_lang

    def patch_lang(fn: Any) -> Any:
        if names.inside:
            return patch(fn)
        names.replace()
        return names

    call = interpreter.InterpretedFunction.__call__

    def quick_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not names.inside:
            return call(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = patch_lang
    interpreter.InterpretedFunction.__call__ = quick_call


def _copy_nothing(interpreter: Any) -> None:
    """Arguments are on the CPU already, where the kernel changes them."""

    def as_they_are(self: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        return list(args), dict(kwargs)

    def nothing(self: Any, *args: Any) -> None:
        pass

    interpreter.GridExecutor._init_args_hst = as_they_are
    interpreter.GridExecutor._restore_args_dev = nothing


def _look_dtypes_up(interpreter: Any, language: Any) -> None:
    of = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:
        if isinstance(dtype, language.block_type):
            dtype = dtype.element_ty
        if isinstance(dtype, language.pointer_type):
            return of(dtype)
        if dtype.name not in known:
            known[dtype.name] = of(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = numpy_dtype
