"""Numbers and events of a run for those who watch many: Prometheus, and a command of the user's (`--on-event`).

    records --> PrometheusHook --> metrics.prom (for node_exporter's textfile collector), or a port of this host alone
            --> EventHook      --> megalite.events --> the command

Both are text of a few kilobytes; the port is served by the standard library.
"""

from __future__ import annotations

import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megalite.events import share_facts, tell_event
from megalite.observe.hooks import Hook, TrainerView
from megalite.observe.stats import Record, StepStats

LABELS = {"valid": "set", "task": "task"}
"""Kinds of records of which an iteration has several, and the key that tells them apart."""
COUNTED = ("skipped_iterations", "nan_iterations")
"""Numbers of an interval that are counted over the run."""
_TEXTS = ("kind", "iteration", "set", "task", *COUNTED)


class PrometheusHook(Hook):
    """The newest number of each kind, as gauges `megalite_...` with the label `run`, and counters `..._total`.

    file: written anew after each record. port: of the loopback device; 0: any that is free.
    """

    def __init__(self, run: str, file: Path | None, port: int | None) -> None:
        self._run, self._file, self._port = run, file, port
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._lock = threading.Lock()
        self.server: ThreadingHTTPServer | None = None

    def on_start(self, trainer: TrainerView) -> None:
        if self._port is not None:
            self.server = ThreadingHTTPServer(("127.0.0.1", self._port), _handler_of(self))
            threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self._set(running=1, iterations=trainer.train_iters, world_size=trainer.mesh.size("world"))
        self._count(**dict.fromkeys((*COUNTED, "saves", "rollbacks"), 0))
        self._write()

    def after_step(self, trainer: TrainerView, stats: StepStats) -> None:
        self._set(iteration=stats.iteration, step_timestamp_seconds=time.time())

    def on_losses(self, trainer: TrainerView, record: Record) -> None:
        kind, key = record["kind"], LABELS.get(record["kind"], "")
        labels = {key: str(record[key])} if key in record else {}
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        prefix = "" if kind == "train" else f"{kind}_"
        self._set(labels, **{prefix + name: value for name, value in numbers.items() if name not in _TEXTS})
        for part, loss in record.get("lm_loss_by_part", {}).items():
            self._set({"part": part}, lm_loss_by_part=loss)
        self._count(**{name: record[name] for name in COUNTED if name in record})
        self._set(consumed_samples=trainer.consumed_samples, consumed_tokens=trainer.consumed_tokens)
        self._write()

    def on_save(self, trainer: TrainerView, record: Record) -> None:
        self._set(save_iteration=record["iteration"], save_time_ms=record["save_time_ms"])
        self._set(save_timestamp_seconds=time.time())
        self._count(saves=1)
        self._write()

    def on_rollback(self, trainer: TrainerView, record: Record) -> None:
        self._count(rollbacks=1)
        self._write()

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        self._set(running=0, failed=int(summary["status"] == "failed"))
        self._write()
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def render(self) -> str:
        """All of it in Prometheus' text format."""
        with self._lock:
            values = sorted(self._values.items())
        lines, before = [], ""
        for (name, labels), value in values:
            if name != before:
                lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
                before = name
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in (("run", self._run), *labels))
            lines.append(f"{name}{{{shown}}} {value!r}")
        return "\n".join(lines) + "\n"

    def _set(self, labels: Record | None = None, **numbers: float) -> None:
        with self._lock:
            for name, value in numbers.items():
                named = "megalite_" + re.sub(r"\W", "_", name)
                self._values[named, tuple((labels or {}).items())] = float(value)

    def _count(self, **numbers: float) -> None:
        with self._lock:
            for name, value in numbers.items():
                key = f"megalite_{name}_total", ()
                self._values[key] = self._values.get(key, 0.0) + value

    def _write(self) -> None:
        """At once as a whole: a collector never reads half of it."""
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            staged = self._file.with_name(f".{self._file.name}.tmp")
            staged.write_text(self.render(), encoding="utf-8")
            os.replace(staged, self._file)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _handler_of(hook: PrometheusHook) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = hook.render().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    return Handler


class EventHook(Hook):
    """Tells `--on-event` of start, saves, rollbacks, slow ranks and the end; of all ranks, who they are.

    tells: whether this rank tells what all ranks know.
    """

    def __init__(self, *, tells: bool) -> None:
        self._tells = tells

    def on_start(self, trainer: TrainerView) -> None:
        share_facts(rank=trainer.mesh.rank, world_size=trainer.mesh.size("world"))
        self._tell("start", iteration=trainer.iteration, train_iters=trainer.train_iters, layout=str(trainer.mesh))

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        slow = {name: value for name, value in record.items() if name.startswith("slowest_rank")}
        if slow:
            self._tell("slow rank", iteration=record["iteration"], **slow)

    def on_save(self, trainer: TrainerView, record: Record) -> None:
        self._tell("save", **record)

    def on_rollback(self, trainer: TrainerView, record: Record) -> None:
        self._tell("rollback", **record)

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        self._tell("end", **summary)

    def _tell(self, event: str, **facts: object) -> None:
        if self._tells:
            tell_event(event, **facts)
