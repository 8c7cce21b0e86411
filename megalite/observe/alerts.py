"""Numbers and events of a run for those who watch many: Prometheus, and a command of the user's (`--on-event`).

records --> PrometheusHook --> metrics.prom (for node_exporter's textfile collector), or a port of this host alone
        --> EventHook      --> megalite.events --> the command
"""

import re
import time
from pathlib import Path
from typing import Any

from megalite.events import tell_event
from megalite.extras import optional_package
from megalite.observe.hooks import Hook, TrainerView
from megalite.observe.stats import Record, StepStats

COUNTED = ("skipped_iterations", "nan_iterations")  # numbers of an interval, of which the run has the sum


class PrometheusHook(Hook):
    """The newest number of each kind, as gauges `megalite_...` with the label `run`, and counters `..._total`, by
    Prometheus' own client. file: written anew after each record. port: of the loopback device; 0: any that is free."""

    def __init__(self, run: str, file: Path | str | None, port: int | None) -> None:
        self._run, self._file, self._port = run, None if file is None else Path(file), port
        self._made: dict[str, Any] = {}
        self.server: Any = None

    def on_start(self, trainer: TrainerView) -> None:
        self.client: Any = optional_package("`prometheus_port`, `prometheus_file`", "prometheus_client")
        self.registry = self.client.CollectorRegistry()
        if self._port is not None:
            self.server, _ = self.client.start_http_server(self._port, "127.0.0.1", self.registry)
        for name in (*COUNTED, "saves", "rollbacks"):
            self._metric(name, "Counter")
        self._set(running=1, train_iters=trainer.train_iters, world_size=trainer.mesh.size("world"))
        saved = {} if trainer.config.checkpoint.save is None else {"save_timestamp_seconds": time.time()}
        self._set(step_timestamp_seconds=time.time(), **saved)  # what never comes is old, too
        self._write()

    def after_step(self, trainer: TrainerView, stats: StepStats) -> None:
        self._set(iteration=stats.iteration, step_timestamp_seconds=time.time())

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        prefix = "" if (kind := record["kind"]) == "train" else f"{kind}_"
        labels = {key: str(record[key]) for key in ("set", "task") if key in record}
        for name, value in {"timestamp_seconds": time.time(), **record}.items():
            if name in COUNTED:
                self._metric(name, "Counter").inc(value)
            elif isinstance(value, int | float):
                self._metric(prefix + name.removeprefix(prefix), **labels).set(value)
        for part, loss in record.get("lm_loss_by_part", {}).items():
            self._metric("lm_loss_by_part", part=part).set(loss)
        if kind in ("save", "rollback"):
            self._metric(f"{kind}s", "Counter").inc()
        self._write()

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        self._set(running=0, failed=int(summary["status"] == "failed"))
        self._write()
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def _metric(self, name: str, kind: str = "Gauge", **labels: str) -> Any:
        """What holds this number, made when it is first asked for."""
        name = "megalite_" + re.sub(r"\W", "_", name)
        if name not in self._made:
            self._made[name] = getattr(self.client, kind)(name, name, ["run", *labels], registry=self.registry)
        return self._made[name].labels(run=self._run, **labels)

    def _set(self, **numbers: float) -> None:
        for name, value in numbers.items():
            self._metric(name).set(value)

    def _write(self) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self.client.write_to_textfile(str(self._file), self.registry)  # at once as a whole


class EventHook(Hook):
    """Tells `--on-event` of start, saves, rollbacks, slow ranks and the end."""

    def on_start(self, trainer: TrainerView) -> None:
        tell_event("start", iteration=trainer.iteration, train_iters=trainer.train_iters, layout=str(trainer.mesh))

    def on_record(self, trainer: TrainerView, record: Record) -> None:
        if record["kind"] in ("save", "rollback"):
            tell_event(record["kind"], **record)
        if slow := {name: value for name, value in record.items() if name.startswith("slowest_rank")}:
            tell_event("slow rank", iteration=record["iteration"], **slow)

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        tell_event("end", **summary)
