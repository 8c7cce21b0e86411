"""What Prometheus and `--on-event` are told, and that nothing that goes wrong there reaches the run.

Of `prometheus_file`, `prometheus_port` and the command."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from megalite.config.cli import parse
from megalite.errors import ConfigError
from megalite.events import EventHandler, share_facts, tell_event
from megalite.observe.alerts import EventHook, PrometheusHook
from megalite.observe.hooks import Hooks, guarded
from megalite.observe.observers import make_hooks
from megalite.observe.stats import evaluation_record
from tests.unit.observe.fake_trainer import FakeTrainer, tiny_config

ROOT = Path(__file__).resolve().parents[3]
needs_client = pytest.mark.skipif(find_spec("prometheus_client") is None, reason="prometheus_client is not installed")
LINE = re.compile(r'^(megalite_\w+)\{(?:part="(\w+)",)?run="[^"]*"(?:,(?:set|task)="((?:[^"\\]|\\.)*)")?\} (\S+)$')


def read(text: str) -> dict[str, float]:
    """Name, with the label that tells several apart -> value; every line must be of the format."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (TYPE megalite_\w+ (gauge|counter)|HELP megalite_\w+ megalite_\w+)", line), line
            continue
        match = LINE.match(line)
        assert match, line
        found[match[1] + (f" {match[2] or match[3]}" if match[2] or match[3] else "")] = float(match[4])
    return found


def text_of(hook: PrometheusHook) -> str:
    return hook.client.generate_latest(hook.registry).decode()


def trained(hook: PrometheusHook, steps: int = 3) -> tuple[FakeTrainer, Hooks]:
    trainer = FakeTrainer(tiny_config(log_interval=1))
    hooks = Hooks([hook])
    hooks.on_start(trainer)
    for _ in range(steps):
        hooks.after_step(trainer, trainer.step(skipped=trainer.iteration == 1))
    return trainer, hooks


@needs_client
def test_the_file_has_the_newest_numbers(tmp_path: Path) -> None:
    path = tmp_path / "collector" / "metrics.prom"
    trainer, hooks = trained(PrometheusHook("a", path, None))
    hooks.on_evaluation(trainer, evaluation_record("valid", 3, loss_sum=6.0, num_tokens=3, set='co"de'))
    hooks.on_evaluation(trainer, {"kind": "task", "iteration": 3, "task": "mine", "acc": 0.5})
    hooks.on_save(trainer, iteration=3, path="x", seconds=0.5)
    found = read(path.read_text())
    assert found["megalite_train_iters"] == 100 and found["megalite_iterations"] == 1, "of the run, of the log line"
    assert found["megalite_lm_loss"] == 2.0 and found["megalite_iteration"] == 3 and found["megalite_running"] == 1
    assert found["megalite_skipped_iterations_total"] == 1 and found["megalite_nan_iterations_total"] == 0
    assert found['megalite_valid_lm_loss co\\"de'] == 2.0 and found["megalite_task_acc mine"] == 0.5
    assert found["megalite_save_iteration"] == 3 and found["megalite_saves_total"] == 1
    assert abs(found["megalite_step_timestamp_seconds"] - time.time()) < 60
    hooks.on_record(trainer, {"kind": "rollback", "iteration": 3})
    hooks.on_end(trainer, "failed")
    found = read(path.read_text())
    assert (found["megalite_rollbacks_total"], found["megalite_running"], found["megalite_failed"]) == (1, 0, 1)
    assert [p.name for p in path.parent.iterdir()] == ["metrics.prom"], "nothing half-written is left"


@needs_client
@pytest.mark.parametrize("save", ["runs/a", None])
def test_a_run_that_never_steps_or_saves_grows_old(save: str | None) -> None:
    """An alert's series must be there from the start: of one that is absent Prometheus computes no age."""
    hook = PrometheusHook("a", None, None)
    config = tiny_config(log_interval=1)
    hook.on_start(FakeTrainer(replace(config, checkpoint=replace(config.checkpoint, save=save))))
    found = read(text_of(hook))
    ages = {name: time.time() - value for name, value in found.items() if "timestamp" in name}
    named = {*re.findall(r"megalite_\w+_timestamp_seconds", (ROOT / "docs" / "alerts.yaml").read_text())}
    assert {*ages} == (named if save else {"megalite_step_timestamp_seconds"})
    assert all(0 <= age < 60 for age in ages.values())


@needs_client
def test_the_port_is_of_this_host_alone_and_ends_with_the_run() -> None:
    hook = PrometheusHook("a", None, 0)
    trainer, hooks = trained(hook)
    assert hook.server is not None
    host, port = hook.server.server_address[:2]
    assert host == "127.0.0.1"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert read(answer.read().decode())["megalite_iteration"] == 3
    hooks.on_end(trainer, "completed")
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1)


@needs_client
def test_prometheus_own_parser_reads_it(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    hook = PrometheusHook('a "run"', None, None)
    trained(hook)
    families = {family.name: family for family in text_string_to_metric_families(text_of(hook))}
    assert families["megalite_lm_loss"].samples[0].labels == {"run": 'a "run"'}
    assert families["megalite_skipped_iterations"].type == "counter"


def test_without_its_client_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    trained(guarded(PrometheusHook("a", None, None), "Prometheus"))
    (line,) = caplog.messages
    assert "Prometheus did not start, training continues" in line and "needs the package prometheus_client" in line


SCRIPT = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


def command(path: Path) -> str:
    return f'{sys.executable} -c "{SCRIPT}" {path}'


def events(path: Path, count: int) -> list[dict]:
    """What the command was told, once it is as much as this."""
    for _ in range(400):
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return sorted(map(json.loads, lines), key=lambda event: event["time"])
        time.sleep(0.05)
    raise AssertionError(f"{len(lines)} of {count} events")


def test_the_command_is_told_what_happens(tmp_path: Path) -> None:
    path = tmp_path / "told"
    trainer, hook = FakeTrainer(tiny_config(log_interval=1)), EventHook()
    hooks = Hooks([hook])
    with EventHandler(command(path), {"save": "runs/a"}):
        share_facts(rank=0, world_size=2)
        hooks.on_start(trainer)
        hooks.after_step(trainer, trainer.step())
        tell_event("spike", iteration=1, norm=9.0)
        slow = {"slowest_rank": 3, "slowest_rank_host": "b", "slowest_rank_ratio": 2.0}
        hook.on_log(trainer, {"kind": "train", "iteration": 1, **slow})
        hooks.on_save(trainer, iteration=1, path="x", seconds=0.5)
        hooks.on_record(trainer, {"kind": "rollback", "iteration": 1})
        hooks.on_end(trainer, "completed")
    found = events(path, 6)
    assert [event["event"] for event in found] == ["start", "spike", "slow rank", "save", "rollback", "end"]
    assert all(event["save"] == "runs/a" and event["rank"] == 0 and event["host"] for event in found)
    assert found[1]["norm"] == 9.0 and found[2]["slowest_rank"] == 3 and found[-1]["status"] == "completed"
    tell_event("spike")  # nobody listens any more
    time.sleep(0.2)
    assert len(events(path, 6)) == 6


def test_other_ranks_tell_only_what_they_alone_know(tmp_path: Path) -> None:
    path = tmp_path / "told"
    trainer = FakeTrainer(tiny_config(on_event="true"))
    hooks = make_hooks(trainer.config, rank=1)
    with EventHandler(command(path), {}):
        hooks.on_start(trainer)
        tell_event("lost", line="rank 3 did not answer any more")
        hooks.on_end(trainer, "failed")
    (event,) = events(path, 1)
    assert event["event"] == "lost" and event["line"].startswith("rank 3")


@pytest.mark.parametrize(
    ("script", "warning"),
    [("import time; time.sleep(60)", "took more than 0.2 s and was ended"), ("raise SystemExit(3)", "status 3")],
)
def test_a_command_that_hangs_or_fails_costs_one_warning(script: str, warning: str, caplog: object) -> None:
    began = time.monotonic()
    with EventHandler(f'{sys.executable} -c "{script}"', {}, seconds=0.2 if "sleep" in script else 20):
        for _ in range(3):
            tell_event("save")
        assert time.monotonic() - began < 2, "never waited for"
        for _ in range(200):
            if caplog.messages:
                break
            time.sleep(0.05)
        time.sleep(0.3)
    (line,) = caplog.messages
    assert warning in line and "training continues" in line


def test_a_command_that_is_not_there_is_an_error_before_the_start() -> None:
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --lr 1e-3"
    flags = [*sizes.split(), "--train-samples", "9", "--mock-data"]
    for text in ("nowhere/notify --now", "notify 'half"):
        with pytest.raises(ConfigError, match="on-event=") as caught:
            parse([*flags, "--on-event", text])
        assert len(caught.value.text.splitlines()) == 1


@needs_client
def test_dashboard_and_alerts_speak_of_numbers_that_there_are() -> None:
    hook = PrometheusHook("a", None, None)
    trainer, hooks = trained(hook)
    hook.on_log(trainer, {"kind": "train", "eta_s": 1.0, "device_hours": 1.0, "skipped_iterations": 0})
    hooks.on_evaluation(trainer, evaluation_record("valid", 3, loss_sum=6.0, num_tokens=3))
    hooks.on_save(trainer, iteration=3, path="x", seconds=0.5)
    hooks.on_end(trainer, "completed")
    docs = Path(__file__).parents[3] / "docs"
    json.loads((docs / "grafana.json").read_text())
    for name in ("grafana.json", "alerts.yaml"):
        named = set(re.findall(r"megalite_\w+", (docs / name).read_text()))
        assert named and named <= read(text_of(hook)).keys(), name
