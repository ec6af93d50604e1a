"""User functions `path/to/file.py:name`: loads a callable by name, with errors that a user can act on."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from mrl.stopping import Stopped

NOTHING: Mapping[str, Any] = MappingProxyType({})
_FOLDERS: set[str] = set()  # folders of loaded files


class FunctionError(RuntimeError):
    """A file lacks the requested function."""


def load(
    spec: str, key: str, arguments: tuple[Any, ...], signature: str, named: Mapping[str, Any] = NOTHING
) -> Callable[..., Any]:
    """Returns the function of `path/to/file.py:name`, the value of the configuration's `key`. Raises FunctionError.

    It must accept `arguments` and `named`, described by `signature`. The file's folder is added to sys.path, so that
    the file can import its neighbours.
    """
    function = find(spec, key)
    _check_signature(function, f"{key} {spec!r}", arguments, named, signature)
    checked: Callable[..., Any] = function
    return checked


def find(spec: str, key: str) -> Any:
    """Returns the object that `path/to/file.py:name` names, like `load`, without a check. Raises FunctionError."""
    path_text, _, name = spec.rpartition(":")
    where = f"{key} {spec!r}"
    path = Path(path_text)
    if not path.is_file():
        meant = near(path.name, (p.name for p in path.parent.glob("*.py"))) if path.parent.is_dir() else ""
        raise FunctionError(f"{where}: file not found: {path.absolute()}{meant}")
    module = _import_file(path.absolute(), where)
    function = getattr(module, name, None)
    if function is None:
        meant = near(name, (key for key, value in vars(module).items() if callable(value) and key[0] != "_"))
        raise FunctionError(f"{where}: {path} defines no {name!r}{meant}")
    return function


def near(name: str, candidates: Iterable[str]) -> str:
    """Returns suggestions for a misspelt name, as the end of a sentence; empty without any."""
    names = sorted(candidates)
    close = difflib.get_close_matches(name, names, n=3)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    return f"; available: {', '.join(map(repr, names[:10]))}" if names else ""


def _import_file(path: Path, where: str) -> ModuleType:
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]  # several folders may have files of one stem
    spec = importlib.util.spec_from_file_location(f"user_functions_{path.stem}_{digest}", path)
    if spec is None or spec.loader is None:
        raise FunctionError(f"{where}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _put_first(path.parent)
    try:
        spec.loader.exec_module(module)
    except Stopped:  # by a signal
        sys.modules.pop(spec.name, None)
        raise
    except (Exception, SystemExit) as error:
        raise FunctionError(f"{where}: importing {path} failed: {_import_error(error, path)}") from error
    return module


def _put_first(folder: Path) -> None:
    """Lets imports find the folder's own files, even if a module of that name from another user's folder is loaded."""
    _FOLDERS.add(str(folder))
    for name, module in list(sys.modules.items()):
        known = vars(module) if isinstance(module, ModuleType) else {}  # getattr would import a lazy module
        home = os.path.dirname(known.get("__file__") or "")
        home = os.path.dirname(home) if "__path__" in known else home
        if home not in _FOLDERS - {str(folder)}:
            continue
        if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
            for loaded in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                del sys.modules[loaded]
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]


def _import_error(error: BaseException, path: Path) -> str:
    """Returns the error with the line of the file that led to it."""
    if isinstance(error, SyntaxError):  # the lines before show the place
        what = traceback.format_exception_only(error)[-1].strip()
    else:
        what = " ".join("".join(traceback.format_exception_only(error)).split())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    where = f" (line {line})" if line is not None else ""
    remedy = f": install it in mrl's environment, {sys.prefix}" if isinstance(error, ModuleNotFoundError) else ""
    return what + where + remedy


def _check_signature(
    function: object, where: str, arguments: tuple[Any, ...], named: Mapping[str, Any], signature: str
) -> None:
    if not callable(function):
        raise FunctionError(f"{where} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise FunctionError(f"{where} is an async function, and mrl does not await it: define it with a plain def")
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError as error:
        raise FunctionError(f"{where} must take {signature}: {error}") from error
    except ValueError:
        return  # a C function without a signature
