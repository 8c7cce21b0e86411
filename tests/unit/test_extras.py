"""What a missing package's line tells people to type: no index has a package megalite of ours."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megalite.errors import ConfigError
from megalite.extras import install_command, optional_package


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, 'pip install "megalite[plot]"'),
        ('{"url": "file:///a/megalite.whl", "archive_info": {}}', 'pip install "megalite[plot]"'),
        ('{"url": "file:///a%20b/c", "dir_info": {"editable": true}}', 'pip install -e "/a b/c[plot]"'),
        (f'{{"url": "file://{Path.cwd()}", "dir_info": {{"editable": true}}}}', 'pip install -e ".[plot]"'),
    ],
    ids=["a wheel", "a wheel's file", "a clone elsewhere", "this clone"],
)
def test_the_extra_of_what_is_installed_is_named(
    origin: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = SimpleNamespace(read_text=lambda name: origin)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
    assert install_command("plot") == command


def test_a_clone_that_is_not_installed_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nowhere)
    assert install_command("plot") == 'pip install -e ".[plot]"'


def test_what_has_to_be_newer_is_the_package_and_not_megalite(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install -U megalite[...]` would look for a newer megalite on an index, where anybody may have put one."""
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    with pytest.raises(ConfigError, match=r"cannot be imported \(.*\); pip install -U matplotlib$"):
        monkeypatch.setattr("importlib.import_module", lambda name: exec_failing(name))
        optional_package("--plot=x", "matplotlib.figure", "matplotlib")


def exec_failing(name: str) -> ModuleType:
    raise ImportError(f"{name}: built for another numpy")
