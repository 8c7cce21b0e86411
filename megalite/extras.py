"""Optional packages: imported where they are used, by a name that leads to the extra of pyproject.toml that installs
them."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlparse

from megalite.errors import ConfigError

#: Extra of pyproject.toml -> packages, as they are imported.
EXTRAS = {
    "hf": ("transformers", "jinja2", "peft"),
    "data": ("datasets", "pyarrow", "sentencepiece", "zstandard"),
    "track": ("tensorboard", "wandb", "prometheus_client"),
    "plot": ("matplotlib",),
    "eval": ("lm_eval",),
    "cloud": ("fsspec", "s3fs"),
    "gcs": ("gcsfs",),
}
EXTRA_OF = {package: extra for extra, packages in EXTRAS.items() for package in packages}

#: Package that no index has -> where it comes from, and what does without it.
ELSEWHERE = {"deep_ep": "https://github.com/deepseek-ai/DeepEP, or leave the flag out"}

#: Module -> package, without which nothing runs.
CORE = {name: name for name in ("numpy", "safetensors", "tokenizers", "torch", "xxhash")} | {"yaml": "pyyaml"}


def install_command(extra: str) -> str:
    """What installs an extra. No index has megalite: the clone is named where it is known; where a wheel is installed,
    pip looks for it nowhere else."""
    try:
        origin = importlib.metadata.distribution("megalite").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return f'pip install -e ".[{extra}]"'
    told = json.loads(origin or "{}")
    if not told.get("dir_info", {}).get("editable"):
        return f'pip install "megalite[{extra}]"'
    clone = unquote(urlparse(told["url"]).path)
    return f'pip install -e "{"." if os.path.realpath(clone) == os.getcwd() else clone}[{extra}]"'


def lacking(flag: str, package: str) -> str:
    """The line for a package that is not installed and that `flag` needs."""
    fix = install_command(EXTRA_OF[package]) if package in EXTRA_OF else f"build it from {ELSEWHERE[package]}"
    return f"{flag}: needs the package {package}; {fix}"


def lacks(module: str) -> bool:
    """Whether a package is not installed; nothing is imported."""
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True


def optional_package(flag: str, module: str, package: str | None = None) -> Any:
    """Imports `module`, which `flag` (as the user gave it, with its value) needs. package: key of EXTRA_OF or ELSEWHERE
    where it is not the first word of `module`. Raises ConfigError where it is not installed, or its import fails."""
    package = package or module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == package:
            raise ConfigError(lacking(flag, package)) from None
        reason: ImportError = error
    except ImportError as error:
        reason = error
    renew = f"pip install -U {package}" if package in EXTRA_OF else f"build it anew from {ELSEWHERE[package]}"
    raise ConfigError(f"{flag}: the package {package} cannot be imported ({reason}); {renew}")


def require_core(*, torch: bool = True, plain: Sequence[str] = ()) -> None:
    """Ends a program, in one line with status 2, where this Python lacks a package that everything needs.

    torch: whether the program needs torch too. plain: names of programs that need no more than YAML.
    """
    program = os.path.basename(sys.argv[0]).removeprefix("megalite-").removesuffix(".py").replace("-", "_")
    arrays = program not in plain
    needed = [package for package in CORE if (torch or package != "torch") and (arrays or package == "yaml")]
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    problem = core_lacks(missing) if missing else too_little_room(torch=torch) if arrays else None
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2)


def too_little_room(*, torch: bool = True) -> str | None:
    """What is wrong where the shell limits memory so far that numpy, or torch, cannot start: their libraries end the
    process themselves, with a stack of C++ or a line that names no limit. Tried in a process of its own, and only where
    there is such a limit."""
    kinds = {"ulimit -v": resource.RLIMIT_AS, "ulimit -d": resource.RLIMIT_DATA}
    limits = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    set_here = {name: limit for name, limit in limits.items() if limit != resource.RLIM_INFINITY}
    if not set_here:
        return None
    # Of torch what an optimizer imports, too, and room for the smallest of models: who has less fails a second later.
    work = "import torch, torch._dynamo; torch.ones(2**24); torch.ones(64, 64) @ torch.ones(64, 64)"
    work = work if torch else "import numpy"
    try:
        tried = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, errors="replace")
        why, failed = tried.stderr.strip().splitlines()[-1:], tried.returncode != 0
    except OSError as error:
        why, failed = [str(error)], True
    if not failed:
        return None
    name, limit = min(set_here.items(), key=lambda item: item[1])
    package = "torch" if torch else "numpy"
    return (
        f"{name}: {limit // 1024:,} KiB, in which {package} cannot start ({' '.join(why)[:120] or 'it ends'}); raise "
        f"the limit ({name} unlimited)"
    )


def core_lacks(modules: Sequence[str]) -> str:
    """The line that says which packages of the core this Python lacks, and what to do."""
    return (
        f"{sys.executable}: lacks {', '.join(CORE[module] for module in modules)}; activate the environment that "
        'megalite is installed in, or install it: pip install -e "."'
    )
