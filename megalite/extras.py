"""Optional packages: imported where they are used, by a name that leads to the extra of pyproject.toml that installs
them."""

from __future__ import annotations

import importlib
from typing import Any

from megalite.errors import ConfigError

#: Package, as it is imported -> extra: `pip install "megalite[EXTRA]"`.
EXTRA_OF = {
    "transformers": "hf",
    "datasets": "data",
    "pyarrow": "data",
    "sentencepiece": "data",
    "zstandard": "data",
    "tensorboard": "track",
    "wandb": "track",
    "matplotlib": "plot",
    "lm_eval": "eval",
}


def optional_package(flag: str, module: str, package: str | None = None) -> Any:
    """Import `module`, of which `flag` (as the user gave it, with its value) has need.

    Args:
        package: key of EXTRA_OF where it is not the first word of `module`.

    Raises:
        ConfigError: it is not installed, or its import fails.
    """
    package = package or module.partition(".")[0]
    extra = f"megalite[{EXTRA_OF[package]}]"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == package:
            raise ConfigError(f'{flag}: needs the package {package}; pip install "{extra}"') from None
        reason: ImportError = error
    except ImportError as error:
        reason = error
    raise ConfigError(f'{flag}: the package {package} can not be imported ({reason}); pip install -U "{extra}"')
