"""scripts/environment.sh on machines that lack something: one line that says what, and nothing of pip's chatter.

Each case is a machine of its own: stand-ins on PATH for every Python that would be found, and an environment without
packages whose pip is a few lines of this file.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("python3.12", "python3.11", "python3", "python3.13", "python")
CHATTER = "WARNING: a warning of pip\n[notice] A new release of pip is available\n"
UNREACHABLE = (
    "WARNING: Retrying after NewConnectionError('Failed to establish a new connection: Network is unreachable')\n"
)
# Makes environments as python3 does, but without pip, which takes seconds.
MAKES_ENVIRONMENTS = f"""#!/bin/bash
if [[ "$1 $2" == "-m venv" ]]; then shift 2; exec {sys.executable} -m venv --without-pip "$@"; fi
exec {sys.executable} "$@"
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with a blank in its name that holds what environment.sh reads, and no Python that is new enough."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (tmp_path / "bin").mkdir()
    stand_in(folder, "#!/bin/bash\nexit 1\n")
    return folder


def stand_in(clone: Path, script: str) -> None:
    """Every Python that is found outside an environment becomes `script`."""
    for name in NAMES:
        path = clone.parent / "bin" / name
        path.write_text(script)
        path.chmod(0o755)


def use_environment(clone: Path, extra: str = "", **variables: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    command = f"set -euo pipefail; source scripts/environment.sh; use_environment {extra}"
    environment = {"PATH": f"{clone.parent / 'bin'}:/usr/bin:/bin", "HOME": str(clone.parent), **variables}
    done = subprocess.run(["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def environment_with_pip(place: Path, output: str, status: int) -> dict[str, str]:
    """Makes an environment without packages, with a pip that says `output`; the variables that activate it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    pip = next(place.glob("lib/python*/site-packages")) / "pip"
    pip.mkdir()
    (pip / "__init__.py").write_text("")
    (pip / "__main__.py").write_text(
        f"import sys\nopen({str(place / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        f"sys.stderr.write({output!r})\nsys.exit({status})\n"
    )
    return {"VIRTUAL_ENV": str(place), "PATH": f"{place / 'bin'}:/usr/bin:/bin"}


def test_no_python_is_new_enough(clone: Path) -> None:
    line = "error: no Python 3.11 or newer found; install one, or activate an environment that has it\n"
    assert use_environment(clone) == (1, "", line)


def test_a_python_without_venv(clone: Path) -> None:
    """As Debian and Ubuntu have it."""
    stand_in(clone, '#!/bin/bash\n[[ "$2" != *ensurepip* ]]\n')
    status, _, error = use_environment(clone)
    assert status == 1 and error.count("\n") == 1
    assert "python3.12 has no module venv" in error and "apt install python3.12-venv" in error


def test_an_active_environment_is_used_and_pip_is_not_heard(clone: Path, tmp_path: Path) -> None:
    active = environment_with_pip(tmp_path / "env", CHATTER, 0)
    status, output, error = use_environment(clone, "dev", **active)
    assert (status, error) == (0, "")
    assert output.startswith(f"installing into {tmp_path / 'env'}, once: torch>=") and output.count("\n") == 1
    calls = (tmp_path / "env" / "calls").read_text().splitlines()
    assert calls[0].endswith(" torch==2.13.0") and calls[1].endswith(" -e .[dev]")
    assert not (clone / ".venv").exists()


def test_an_installation_that_fails_shows_its_error(clone: Path, tmp_path: Path) -> None:
    active = environment_with_pip(tmp_path / "env", CHATTER + "ERROR: No space left on device\n", 1)
    status, _, error = use_environment(clone, **active)
    assert status == 1
    assert error == "ERROR: No space left on device\nerror: pip could not install torch==2.13.0: see above\n"


@pytest.mark.parametrize("told", [UNREACHABLE, "ERROR: Could not find torch==2.13.0 (from versions: none)\n"])
def test_no_network_is_one_line(clone: Path, tmp_path: Path, told: str) -> None:
    active = environment_with_pip(tmp_path / "env", told + "ERROR: No matching distribution found\n", 1)
    status, _, error = use_environment(clone, **active)
    assert status == 1 and error.count("\n") == 1
    assert error.startswith("error: pip reaches no package index that has torch==2.13.0; connect this machine")


@pytest.mark.parametrize("state", ["moved", "no pip", "half"])
def test_an_environment_that_does_not_work_is_made_again(clone: Path, tmp_path: Path, state: str) -> None:
    """The clone was moved; making it, or pip's work, was interrupted. An active environment that is gone is none."""
    stand_in(clone, MAKES_ENVIRONMENTS)
    environment_with_pip(tmp_path / "other" if state == "moved" else clone / ".venv", "", 0)
    packages = next(tmp_path.glob("**/site-packages"))
    if state == "moved":
        (tmp_path / "other").rename(clone / ".venv")
    elif state == "no pip":
        shutil.rmtree(packages / "pip")
    else:
        (packages / "torch-2.13.0.dist-info").mkdir()
        (packages / "torch-2.13.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.13.0\n")
    status, output, error = use_environment(clone, VIRTUAL_ENV="/gone")
    why = {"moved": "its Python does not work here", "no pip": "it has no pip", "half": "torch is installed by half"}
    assert output == f"making .venv again: {why[state]}\n"
    assert status == 1 and error.count("\n") == 1 and "has no pip; run python -m ensurepip" in error
    assert subprocess.run([clone / ".venv" / "bin" / "python", "-c", ""]).returncode == 0


def test_an_environment_behind_a_link_is_left_alone(clone: Path, tmp_path: Path) -> None:
    """It may be another clone's: it is not cleared because pip is missing, or does not answer, at this moment."""
    environment_with_pip(tmp_path / "shared", "", 0)
    shutil.rmtree(next(tmp_path.glob("**/site-packages")) / "pip")
    (clone / ".venv").symlink_to(tmp_path / "shared")
    stand_in(clone, MAKES_ENVIRONMENTS)
    status, output, error = use_environment(clone)
    assert (status, output) == (1, "") and error.count("\n") == 1
    assert ".venv is a link to" in error and "it has no pip; remove the link" in error
    assert (tmp_path / "shared" / "bin" / "python").exists()


def test_condas_base_counts_only_with_torch_in_it(clone: Path, tmp_path: Path) -> None:
    base = environment_with_pip(tmp_path / "conda", "", 1)
    del base["VIRTUAL_ENV"]
    stand_in(clone, MAKES_ENVIRONMENTS)
    base |= {"CONDA_PREFIX": str(tmp_path / "conda"), "CONDA_DEFAULT_ENV": "base"}
    base["PATH"] = f"{tmp_path / 'conda' / 'bin'}:{clone.parent / 'bin'}:/usr/bin:/bin"
    python = (tmp_path / "conda" / "bin" / "python").resolve()
    for path in (tmp_path / "conda" / "bin").glob("python*"):
        path.unlink()  # the stand-ins make .venv
    (tmp_path / "conda" / "bin" / "python").symlink_to(python)
    _, _, error = use_environment(clone, **base)
    assert f"the environment {clone / '.venv'} lacks" in error
    shutil.rmtree(clone / ".venv")
    (next((tmp_path / "conda").glob("lib/python*/site-packages")) / "torch.py").write_text("")
    _, output, _ = use_environment(clone, **base)
    assert output.startswith(f"installing into {tmp_path / 'conda'}, once: ")


def test_where_nothing_is_missing_nothing_is_installed(clone: Path, tmp_path: Path) -> None:
    """A requirement that names an extra (`moto[s3]`) is there under its own name."""
    active = environment_with_pip(tmp_path / "env", CHATTER, 0)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = next((tmp_path / "env").glob("lib/python*/site-packages"))
    for requirement in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        name = re.findall(r"[\w-]+", requirement)[0]
        information = packages / f"{name.replace('-', '_')}-9999.dist-info"
        information.mkdir(exist_ok=True)
        (information / "METADATA").write_text(f"Name: {name}\nVersion: 9999\n")
        (information / "RECORD").write_text("")
    assert use_environment(clone, "dev", **active) == (0, "", "")


def test_a_torch_that_is_too_old_is_not_replaced(clone: Path, tmp_path: Path) -> None:
    active = environment_with_pip(tmp_path / "env", "", 0)
    information = next((tmp_path / "env").glob("lib/python*/site-packages")) / "torch-2.4.1+cu121.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: torch\nVersion: 2.4.1+cu121\n")
    status, output, error = use_environment(clone, **active)
    assert (status, output) == (1, "") and not (tmp_path / "env" / "calls").exists()
    least = "torch>=2.11"
    assert (
        error == f"error: the active environment has torch 2.4.1+cu121, and megalite needs {least}; activate another\n"
    )


def test_a_folder_that_can_not_be_written(clone: Path) -> None:
    stand_in(clone, MAKES_ENVIRONMENTS)
    (clone / ".venv").write_text("")  # as good as a read-only folder, for root too
    os.chmod(clone / ".venv", 0o444)
    status, _, error = use_environment(clone)
    assert status == 1
    assert error.splitlines()[-1].startswith(f"error: {clone / '.venv'} cannot be made (")
