"""Flags that people read about exist: in messages, documentation, scripts and configurations."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import literals

from megalite.config import accepted_spellings
from megalite.config.names import CONSTANT_FLAGS, EXTRA_OPTIONS, RENAMED, SHORT_FORMS
from megalite.config.reader import Reader
from megalite.config.root import all_options
from megalite.errors import SETTING
from tools.make_flag_table import flag_table, main

ROOT = Path(__file__).parents[3]
# Options of programs that our scripts and pages call.
OTHERS = {
    "torchrun": "nproc-per-node nnodes node-rank master-addr master-port standalone rdzv-backend rdzv-endpoint rdzv-id "
    "rdzv-conf log-dir redirects",
    "sbatch, srun": "nodes ntasks-per-node gpus-per-node gpus-per-task gpu-bind cpus-per-task time requeue open-mode "
    "output signal job-name kill-on-bad-exit ntasks exclude container-image container-mounts container-workdir",
    "mpirun": "bind-to host np",
    "pip, git, ruff, pytest": "quiet upgrade editable index-url check strict-markers full turn landing durations "
    "no-build-isolation config-settings build-option cpp_ext cuda_ext no-input "
    "disable-pip-version-check clear no-deps wheel-dir ignore",
    "unshare, mount": "uts ipc mount pid fork mount-proc bind",
    "hf": "local-dir",
    "coverage, pre-commit": "coverage data-file source skip-covered sort force-exclude",
    "scripts/missing_packages.py": "incomplete",
    "the peer-benchmark lab": "extra",
    "Megatron-LM": "dist-ckpt-optim-fully-reshardable",
    "a stand-in in a docstring": "flag no name record",
}
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:[-_][a-z0-9]+)*)(?![\w-]|\{)(?!.*--[+>]| *--)")


def repository_files() -> list[Path]:
    if shutil.which("git") is None:
        pytest.skip("no git")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]


def test_no_text_names_a_flag_that_does_not_exist() -> None:
    files = [path for path in repository_files() if path.suffix in {".py", ".md", ".sh", ".sbatch", ".yaml", ".toml"}]
    texts = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in files}
    known = Reader().known | {"config", "help"}
    for path, text in texts.items():
        if path.parts[0] in ("tools", "benchmarks") or "ArgumentParser" in text:
            own = {name.replace("-", "_") for name in re.findall(r"\"--([a-z][\w-]*)\"", text)}
            own |= set(re.findall(r"\"(\w+)\": Flag\(", text))
            known |= own | {f"no_{name}" for name in own}
    known |= {name.replace("-", "_") for names in OTHERS.values() for name in names.split()}
    # Tests misspell on purpose; the page for Megatron's users and the table of refused flags have tests of their own.
    apart = (
        Path("tests"),
        Path("docs/from_megatron.md"),
        Path("docs/flags.md"),
        Path("docs/megatron_flags.md"),
        Path("CHANGELOG.md"),
    )
    unknown = [
        f"{path}:{number}: --{name}"
        for path, text in texts.items()
        if not any(path.is_relative_to(folder) for folder in apart)
        for number, line in enumerate(text.splitlines(), 1)
        for name in FLAG.findall(line)
        if name.replace("-", "_") not in known
    ]
    unknown += [
        f"{path}:{line}: `{name}`"
        for path, text in texts.items()
        if path.parts[0] == "megalite" and path.suffix == ".py"
        for line, literal in literals(ast.parse(text))
        for name in SETTING.findall(literal)
        if name not in known
    ]
    assert not unknown, "\n".join(unknown)


def test_the_flag_table_is_up_to_date() -> None:
    assert main(["--check"]) == 0, "run python tools/make_flag_table.py"
    page = flag_table()
    for option in all_options().values():
        assert f"| `{option.flag}` |" in page


def megatron_rows() -> list[tuple[str, str, str]]:
    rows = re.findall(r"^\| `(--[\w-]+)` \| (.*?) \| (.*?) ?\|$", (ROOT / "docs/from_megatron.md").read_text(), re.M)
    return [(flag, here, note) for flag, here, note in rows]


@pytest.mark.parametrize(("flag", "here", "note"), megatron_rows(), ids=[row[0] for row in megatron_rows()])
def test_each_row_of_the_page_for_megatron_users(flag: str, here: str, note: str) -> None:
    name = flag[2:].replace("-", "_")
    known = Reader().known
    assert name in known
    assert here == "same" or name in accepted_spellings()
    for other in FLAG.findall(f"{here} {note}"):
        assert other.replace("-", "_") in known | {"config"}


def test_tables_of_names_point_at_fields() -> None:
    options = all_options()
    for target in [*RENAMED.values(), *SHORT_FORMS.values(), *(name for name, _ in CONSTANT_FLAGS.values())]:
        assert target in options, target
    for name in [*RENAMED, *CONSTANT_FLAGS, *EXTRA_OPTIONS]:
        assert name not in options, name


def test_without_docstrings_no_signature_stands_in_the_help() -> None:
    code = "from megalite.config.arguments import argument_flags; print({f.help for f in argument_flags().values()})"
    command = [sys.executable, "-B", "-OO", "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "soft caps" in said and "(*," not in said
