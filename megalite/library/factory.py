"""A module by its name: `package.module:factory` or `my_model.py:factory`, as `--model-module` gives it."""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from megalite.errors import ConfigError


def module_of(name: str, *, seed: int, vocab_size: int, seq_length: int) -> nn.Module:
    """What the function `name` makes; torch's generator begins at `seed`, so all ranks make the same.

    It is called with those of `vocab_size` and `seq_length` that it takes. Packages are looked for in the working
    folder, too. Raises ConfigError in one line, with that of the user's code, for whatever goes wrong.
    """
    factory = _factory(name)
    offered = {"vocab_size": vocab_size, "seq_length": seq_length}
    arguments = _arguments(factory, offered, name)
    torch.manual_seed(seed)
    try:
        made = factory(**arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever somebody's function raises, sys.exit too
        raise ConfigError(f"`model_module`={name}: {_reason(error)}") from None
    if inspect.iscoroutine(made):
        made.close()  # or Python adds lines of its own
    if not isinstance(made, nn.Module):
        raise ConfigError(f"`model_module`={name}: returns {type(made).__name__}; a torch.nn.Module is wanted")
    return made


def _factory(name: str) -> Callable[..., Any]:
    where, _, attribute = name.rpartition(":")
    try:
        if where.endswith(".py"):
            module = _file(Path(where))
        else:
            if os.getcwd() not in sys.path and "" not in sys.path:
                sys.path.append(os.getcwd())
            module = importlib.import_module(where)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever is wrong with somebody's file, and its sys.exit
        raise ConfigError(f"`model_module`={name}: {_reason(error)}") from None
    found: Any = getattr(module, attribute, None)
    if not callable(found) or isinstance(found, nn.Module):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = f"; it has {', '.join(sorted(public)[:8])}" if public else ""
        what = "has no function of that name" if found is None else f"{attribute} is no function that makes a module"
        raise ConfigError(f"`model_module`={name}: {where} {what}{near}")
    return found  # type: ignore[no-any-return]  # the user's


def _file(path: Path) -> ModuleType:
    """Runs a file as Python runs a script: what lies beside it can be imported."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"model_module_{path.stem}", path)  # hides no package
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _arguments(factory: Callable[..., Any], offered: dict[str, int], name: str) -> dict[str, int]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # a function without a signature
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in parameters:
        optional = parameter.default is not parameter.empty or parameter.kind not in kinds
        if not optional and parameter.name not in offered:
            raise ConfigError(
                f"`model_module`={name}: takes {parameter.name}, which has no default; {' and '.join(offered)} are "
                "given where they are taken, and nothing else"
            )
    taken = {parameter.name for parameter in parameters if parameter.kind in kinds}
    return {key: value for key, value in offered.items() if key in taken}


def _reason(error: BaseException) -> str:
    """`my_model.py:7: ValueError: ...` of what the user's code raised."""
    ours, torchs = (__file__, importlib.__file__), str(Path(torch.__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours and f.filename[0] != "<"]
    theirs = [frame for frame in frames if not frame.filename.startswith(torchs)] or frames
    while isinstance(error, SystemExit) and len(theirs) > 1 and theirs[-1].name == "exit":
        theirs.pop()  # some packages put a function of their own in the place of sys.exit
    at = f"{theirs[-1].filename}:{theirs[-1].lineno}: " if theirs else ""
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        return f"{at}ends the program by sys.exit({' '.join(code.split())[:200]}); raise an exception that says why"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{at}{type(error).__name__}: {first or (theirs[-1].line if theirs else 'without a text')}"
