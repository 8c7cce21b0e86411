"""What this Python lacks of megalite's dependencies, on one line; nothing where it lacks nothing.

    python scripts/missing_packages.py [EXTRA]         of the core, and of an extra of pyproject.toml
    python scripts/missing_packages.py --incomplete    packages whose installation was interrupted

Reads pyproject.toml and the metadata of what is installed; imports none of it. Exit status 1, with one line on standard
error: this Python is too old, or has a torch that is, which is not for a script to replace.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def main(argv: list[str]) -> int | str:
    """The exit status, or the line to exit with."""
    if sys.version_info < (3, 11):  # noqa: UP036  (this file runs before that is known)
        return f"error: the active environment has Python {sys.version.split()[0]}; megalite needs 3.11 or newer"
    if argv == ["--incomplete"]:
        print(", ".join(incomplete()))
        return 0
    missing = [requirement for requirement in requirements(*argv) if not holds(requirement)]
    for requirement in missing:
        version = installed(requirement)
        if version and requirement.startswith("torch>"):
            return (
                f"error: the active environment has torch {version}, and megalite needs {requirement}; activate another"
            )
    print(", ".join(missing))
    return 0


def requirements(extra: str | None = None) -> Iterator[str]:
    """`name>=version` of all that the core and the extra ask for."""
    import tomllib  # of Python 3.11

    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    yield from project["dependencies"]
    for requirement in project["optional-dependencies"][extra] if extra else ():
        if requirement.startswith("megalite["):
            for other in requirement[len("megalite[") : -1].split(","):
                yield from (one for one in requirements(other) if one not in project["dependencies"])
        else:
            yield requirement


def installed(requirement: str) -> str | None:
    """Version of the package that is there."""
    try:
        return importlib.metadata.version(re.split(r"[^\w.-]", requirement)[0])  # `moto[s3]>=5` is moto's
    except importlib.metadata.PackageNotFoundError:
        return None


def holds(requirement: str) -> bool:
    """Whether the package is there in a version that will do."""
    version = installed(requirement)
    return version is not None and numbers(version) >= numbers(requirement.partition(">=")[2])


def numbers(version: str) -> list[int]:
    """2.13.0+cpu -> [2, 13, 0]."""
    return [int(part) for part in re.split(r"[^\d.]", version)[0].split(".") if part]


def incomplete() -> Iterator[str]:
    """Packages that pip began to install and did not end: it writes their RECORD last."""
    for package in importlib.metadata.distributions():
        if package.read_text("METADATA") is not None and package.read_text("RECORD") is None:
            yield f"{package.metadata['Name']} is installed by half"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
