"""tools/doctor.py: the report, the apex question, and a collective test that fails when it should."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from megalite.comm.world import World
from megalite.errors import ConfigError
from megalite.planner.hardware import parse_hardware
from megalite.testing import run_single

ROOT = Path(__file__).resolve().parents[2]


def _doctor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doctor", ROOT / "tools" / "doctor.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def body_report(world: World) -> None:
    _doctor().main([])


def test_report_names_versions_packages_and_speeds(capfd: pytest.CaptureFixture[str]) -> None:
    run_single(body_report)
    output = capfd.readouterr().out
    for word in (
        "torch  ",
        "safetensors",
        "wandb",
        "prometheus_client",
        "apex",
        "2 ranks on 1 host",
        "all-reduce",
        "inside a node",
        "ready",
    ):
        assert word in output
    known = yaml.safe_load((ROOT / "megalite/planner/hardware/h100.yaml").read_text())
    lines = [line for line in output.splitlines() if line.startswith(("  host_", "  disk_"))]
    hardware = parse_hardware(known | yaml.safe_load("\n".join(line.strip() for line in lines)), "doctor")
    assert min(hardware.host_copy, hardware.disk_read, hardware.disk_write) > 1e6


def test_a_disk_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--disk=.*/none: cannot be measured \(No such file or directory\); give"):
        _doctor().print_memory(str(tmp_path / "none"))


@pytest.mark.parametrize(("hip", "cuda", "line"), [("6.2.41133", None, "hip"), (None, "12.8", "cuda")])
def test_a_torch_for_rocm_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hip: str | None, cuda: str | None, line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    _doctor().print_environment()
    assert [row.split() for row in capsys.readouterr().out.splitlines()][-2:] == [["gpus", "8"], [line, hip or cuda]]


def forget_apex() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


def test_a_package_called_apex_is_not_taken_for_nvidias(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    doctor = _doctor()
    installed = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "apex"}
    if importlib.util.find_spec("apex") is None:
        assert doctor.apex_state().startswith("missing")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        forget_apex()
        assert doctor.apex_state().startswith("another package of that name")
        (tmp_path / "apex" / "optimizers.py").write_text("class FusedAdam: pass\n")
        forget_apex()
        importlib.invalidate_caches()
        assert doctor.apex_state().startswith("NVIDIA's (apex.optimizers.FusedAdam imports)")
    finally:  # other tests ask whether it can be imported
        forget_apex()
        sys.modules.update(installed)


def test_unknown_flags_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean --skip-collectives"):
        _doctor().main(["--skip-colectives"])


def body_meshes(world: World) -> None:
    _doctor().print_collectives("2x1,1x1")


def test_the_groups_of_meshes_are_tested(capfd: pytest.CaptureFixture[str]) -> None:
    run_single(body_meshes)
    output = capfd.readouterr().out
    assert "3 ranks on 1 host" in output and "cpu; 2x1,1x1" in output and re.search(r"^tp +2 +all-reduce", output, re.M)


def test_bad_meshes_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"--stage-meshes=2y1: '2y1' is not TPxREPLICAS"):
        _doctor().print_collectives("2y1")
    with pytest.raises(ConfigError, match="--stage-meshes=1x2,1x1: has no effect with --skip-collectives"):
        _doctor().main(["--stage-meshes", "1x2,1x1", "--skip-collectives"])
