"""What a run's directory tells of its past: who computed an iteration, with which configuration, and what was logged.

metrics.jsonl   its start lines: where processes began, on how many ranks, with which flags other than before
checkpoints     the configuration and the data of the process that saved them
config.yaml     the configuration of the newest process
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.checkpoint import committed, read_extra, read_manifest, step_of
from megalite.errors import ConfigError
from megalite.observe import METRICS_FILE, Record, read_metrics

CONFIG = "config.yaml"
SCHEDULES = "opt_param_scheduler"
"""Where a checkpoint's meta has the schedules of learning rate and weight decay."""
LAYOUT = "layout:"
"""The name under which a start line tells of another layout; other names there are flags."""


@dataclass(frozen=True)
class Leg:
    """What one process computed: the iterations after `begin`, up to where the next one begins.

    ranks: how many it had, where that is known. changed: what it had otherwise than the checkpoint that it continued.
    start: its start line.
    """

    begin: int
    ranks: int | None = None
    changed: tuple[str, ...] = ()
    start: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flags(self) -> list[str]:
        return [name for name in self.changed if name != LAYOUT]


@dataclass(frozen=True)
class Past:
    """What ranks need to know of it. begin, end: they compute the iterations between, `end` is the first that was
    logged from the one that is looked at. lines: what was logged of them. witness: the checkpoint whose data the run
    must have, None where that is not to be looked at. otherwise: what is not as in the run, and may round otherwise.
    legs: the processes that computed them. replaced: lines of which later ones tell otherwise, or the same.
    """

    run: Path
    iteration: int
    begin: int
    end: int
    lines: Sequence[Record] = ()
    witness: Path | None = None
    otherwise: Sequence[str] = ()
    legs: Sequence[Leg] = ()
    replaced: Sequence[Record] = ()

    def replaced_values(self, iteration: int, name: str) -> list[float | None]:
        """What lines that no longer hold say of an iteration."""
        return [line.get(name) for line in self.replaced if line["iteration"] == iteration]


@dataclass(frozen=True)
class History:
    """Of the run that is in `run` now, seen from an iteration.

    legs: oldest first. lines: the training lines of metrics.jsonl, by iteration. replaced: those that no longer hold.
    """

    run: Path
    iteration: int
    saves: Sequence[Path]
    legs: Sequence[Leg]
    lines: Sequence[Record]
    replaced: Sequence[Record] = ()

    @classmethod
    def read(cls, run: Path, iteration: int) -> History:
        """Raises MegaliteError."""
        path = run / METRICS_FILE
        try:
            records = read_metrics(path, every=True) if path.is_file() else []
        except OSError as error:
            raise ConfigError(f"--load={run}: {METRICS_FILE} cannot be read ({error.strerror})") from None
        legs, lines = legs_and_lines(records)
        held = {id(line) for line in lines}
        replaced = [one for one in records if one["kind"] == "train" and id(one) not in held]
        return cls(run, iteration, [path for path in committed(run) if isinstance(path, Path)], legs, lines, replaced)

    @property
    def before(self) -> Path | None:
        """The checkpoint that the iteration is reached from."""
        return max((path for path in self.saves if step_of(path) < self.iteration), key=step_of, default=None)

    @property
    def after(self) -> Path | None:
        """The first checkpoint that the iteration is in: of the process that computed it, unless others are gone."""
        return min((path for path in self.saves if step_of(path) >= self.iteration), key=step_of, default=None)

    @property
    def begin(self) -> int:
        return 0 if self.before is None else step_of(self.before)

    @property
    def leg(self) -> Leg:
        """The one that computed the iteration."""
        return next((leg for leg in reversed(self.legs) if leg.begin < self.iteration), Leg(0))

    @property
    def between(self) -> list[Leg]:
        """Those that continued from a checkpoint between `before` and `after`, which is gone."""
        end = None if self.after is None else step_of(self.after)
        return [leg for leg in self.legs if leg.begin > self.begin and (end is None or leg.begin < end)]

    def source(self) -> Path | None:
        """The checkpoint that has the configuration of all iterations from `before` on up to this one; None for
        config.yaml. Raises ConfigError where nothing has it."""
        other = next((leg for leg in self.between if leg.flags), None)
        if other is None:
            return self.after
        as_before = not any(leg.flags for leg in self.legs if self.begin <= leg.begin < self.iteration)
        if as_before and self.before is not None:
            return self.before
        near = f"after {step_of(self.after)}" if self.after is not None else f"up to {other.begin}"
        raise ConfigError(
            f"--iteration={self.iteration}: from iteration {other.begin} on the run had another "
            f"{' and another '.join(other.flags[:3])}, and the checkpoint that tells from what is gone; "
            f"choose an iteration {near}"
        )

    def config_file(self) -> Path:
        """Raises MegaliteError."""
        source = self.source()
        manifest = read_manifest(source) if source is not None else None
        if source is None or manifest is None or CONFIG not in manifest.extra_files:
            return self.run / CONFIG
        read_extra(source, manifest, CONFIG)  # proves it
        return source / CONFIG

    def ranks(self) -> int | None:
        """How many the configuration was for."""
        source = self.source()
        return self.leg.ranks if source is None else read_manifest(source).world_size

    def keeps_schedules(self) -> bool:
        """Whether learning rate and weight decay follow the schedules that `before` holds, not those of other flags."""
        saves = [path for path in (self.before, self.source()) if path is not None]
        if len(saves) < 2:
            return not any(leg.begin == self.begin for leg in self.legs)
        one, other = (read_manifest(path).meta.get(SCHEDULES) for path in saves)
        return one == other

    def past(self, other_data: bool, otherwise: Iterable[str]) -> Past:
        """other_data: data that are not the run's are wanted. otherwise: what else has changed."""
        # where the next process had something otherwise, the way ends
        stop = min((leg.begin for leg in self.legs if leg.changed and leg.begin >= self.iteration), default=None)
        lines = [line for line in self.lines if line["iteration"] > self.begin]
        lines = [line for line in lines if stop is None or line["iteration"] <= stop]
        end = next((line["iteration"] for line in lines if line["iteration"] >= self.iteration), self.iteration)
        lines = [line for line in lines if line["iteration"] <= end]
        names = [name for leg in self.between for name in leg.changed]  # the run itself was laid out in two ways
        told = tuple(dict.fromkeys(name.rstrip(":") for name in (*otherwise, *names)))
        first = max((leg.begin for leg in self.legs if leg.begin <= self.begin), default=self.begin)
        legs = [leg for leg in self.legs if first <= leg.begin < end]
        witness = None if other_data else self.after
        return Past(self.run, self.iteration, self.begin, end, lines, witness, told, legs, self.replaced)


def legs_and_lines(records: Iterable[Record]) -> tuple[list[Leg], list[Record]]:
    """In the order in which they were written -> what became of the run: what a process computed again counts."""
    parts: list[tuple[Leg, list[Record]]] = [(Leg(0), [])]
    for record in records:
        if record["kind"] == "start":
            size, changed = record.get("world_size"), record.get("changed")
            names = tuple(changed) if isinstance(changed, dict) else ()
            parts.append((Leg(record["iteration"], size if type(size) is int else None, names, record), []))
        elif record["kind"] == "train":
            parts[-1][1].append(record)
    legs: list[Leg] = []
    lines: list[Record] = []
    for leg, own in parts if parts[0][1] or len(parts) == 1 else parts[1:]:
        legs = [*(one for one in legs if one.begin < leg.begin), leg]
        reached = own[-1]["iteration"] if own else leg.begin
        lines = [*(one for one in lines if not leg.begin < one["iteration"] <= reached), *own]
    once = {one["iteration"]: one for one in lines}
    return legs, [once[iteration] for iteration in sorted(once)]
