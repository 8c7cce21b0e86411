"""What one process computes, piece by piece: the oracle's run (`megalite.testing.oracle`) with everything written down.

    forward/LAYER/SAMPLE    output [s, h] of a layer        gradient/U/NAME   of update U, before clipping
    backward/LAYER/SAMPLE   the loss's gradient in it       state/U/NAME      masters and moments after U updates
    loss/SAMPLE, factor/SAMPLE    summed loss of the micro-batch that begins with the sample, and its weight
    compute/U/NAME    what is computed with after U updates, where `--staleness-correction` makes it another tensor

Samples have global numbers, so that a rank finds what it should have computed whatever it computes and whenever.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megalite.comm import World
from megalite.config import Config, ParallelConfig, StalenessCorrection, dump_yaml, parse
from megalite.inventory import computations, stage_layer_ranges
from megalite.microbatch import PIECE, Microbatch
from megalite.proof.branches import Branches, clips, is_delayed
from megalite.proof.correction import LAST_STEP, Corrected, Delays, delay_of
from megalite.schedule import Program, find_schedule
from megalite.testing.oracle import Pupil
from megalite.testing.rates import decay_of, learning_rates

TOLERANCE = 1e-9
"""Relative differences above it are differences, for rules that make of a rounding what AdamW makes of it."""
FIRST_BOUND, TRIES = 0.1, 4
"""Of the norm: the bound of the run that shows how large norms are, and runs in which one between them is sought."""
TENSORS, FACTS = "reference.safetensors", "reference.json"


def record(
    world: World, config_file: str, world_size: int, steps: int, folder: str, branches: Branches
) -> tuple[float, int, int]:
    """Runs the oracle for the configuration of `world_size` ranks in this process; its numbers go to `folder`. Returns
    the bound of the norm with which some updates are clipped, how many of them are, and how many are taken."""
    config = parse(["--config", config_file], world_size=world_size)
    if not config.optimizer.clip_grad:
        _write(config, world_size, steps, folder, branches)
        return 0.0, 0, 0
    bound, clipped, norms = min(config.optimizer.clip_grad, FIRST_BOUND), 0, [0.0]
    for _ in range(TRIES):
        limited = replace(config, optimizer=replace(config.optimizer, clip_grad=bound))
        norms = _write(limited, world_size, steps, folder, branches)
        clipped = sum(norm > bound for norm in norms)
        nearest = next(clips(norms), None)
        if 0 < clipped < len(norms) or nearest is None:
            break
        bound = nearest
    return bound, clipped, len(norms)


def _write(config: Config, world_size: int, steps: int, folder: str, branches: Branches) -> list[float]:
    """One run; the norms of the updates that are taken."""
    alone = Path(folder) / "alone.yaml"
    alone.write_text(dump_yaml(_alone(config, world_size)), encoding="utf-8")
    pupil = Pupil(("--config", str(alone)))
    pupil.whole = config.total_train_samples(world_size)
    pupil.samples = config.global_batch_size(world_size)
    pupil.rule = rule = Corrected(pupil.rule, config.staleness)
    found = _Record(rule, {}, {}, [])
    found.listen(pupil)
    # PipeDream's update: one micro-batch of every replica
    by_microbatch = find_schedule(config.parallel.schedule).update_per_microbatch
    together = config.microbatches_together(world_size) if by_microbatch else 0
    lag = _lags(pupil, config) if together else {}
    sizes, consumed, scheduled = config.batch_size_schedule(world_size), 0, 0
    found.weights(pupil, {})
    with pupil.data.train_loader(0) as loader:
        for step in range(steps):
            batch, skipped = loader.next_batch(sizes.at(consumed)), step + 1 == branches.skipped
            loss, behind, following = 0.0, _behind(config, step, lag), _behind(config, step + 1, lag)
            for begin in range(0, len(batch), together or len(batch)):
                samples = batch[begin : begin + (together or len(batch))]
                mean = found.update(pupil, samples, _Place(behind, following, scheduled, skipped))
                loss += mean * pupil.weight(samples, batch)
            found.steps.append({"loss": loss, "samples": [consumed, consumed + sizes.at(consumed)]})
            scheduled += 0 if skipped else sizes.at(consumed)
            consumed += sizes.at(consumed)
    scales = branches.scales(steps, late=is_delayed(config))
    found.write(Path(folder), pupil, skipped=branches.skipped, scales=scales)
    return [update["norm"] for update in found.updates if update["norm"] is not None]


def _alone(config: Config, world_size: int) -> Config:
    """The same training in one process, nothing recomputed, late or corrected; micro-batches are cut alike."""
    model = replace(
        config.model, recompute_granularity=None, recompute_method=None, recompute_num_layers=None,
        cpu_offloading_num_layers=0,
    )  # fmt: skip
    optimizer = replace(config.optimizer, staleness=StalenessCorrection())
    return replace(config, model=model, optimizer=optimizer, parallel=ParallelConfig(hardware=config.parallel.hardware))


def _lags(pupil: Pupil, config: Config) -> Delays:
    """PipeDream: updates that a layer's weights are behind when a micro-batch comes to it."""
    program = endless_program(config)
    cuts = stage_layer_ranges(config, program)
    return {pupil.specs[i].name: program.staleness[stage] for stage, cut in enumerate(cuts) for i in cut}


def endless_program(config: Config) -> Program:
    """PipeDream's, of batches that are long enough for any delay."""
    rounds = 4 * config.parallel.pipeline_model_parallel_size
    return computations(config, rounds * config.microbatches_together(config.parallel.model_parallel_size))


def _behind(config: Config, step: int, lag: Delays) -> Delays:
    """The delays of the iteration after `step` others."""
    if lag:
        return lag
    schedule = find_schedule(config.parallel.schedule)
    late = schedule.flush_schedule is not None or config.optimizer.offload.delayed_parameter_update
    return {"": int(late and step >= config.parallel.pipeline_flush_steps)}


@dataclass(frozen=True)
class _Place:
    """Of an update: the delays of its iteration and of the following one, samples that the schedules have seen, and
    whether it is skipped."""

    behind: Delays
    following: Delays
    scheduled: int
    skipped: bool


@dataclass
class _Record:
    rule: Corrected
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    versions: list[dict[str, Tensor]]

    def __post_init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.updates: list[dict[str, Any]] = []
        self.taken = 0

    def listen(self, pupil: Pupil) -> None:
        for name, layer in zip(pupil.model.names, pupil.model.ordered(), strict=True):
            layer.register_forward_hook(lambda module, args, out, name=name: self._heard(name, args[1], out))

    def _heard(self, layer: str, microbatch: Microbatch, out: Tensor) -> None:
        samples = microbatch.sample_ids.tolist()
        if out.dim() == 0:
            self.tensors[f"loss/{samples[0]}"] = out.detach().clone()
            out.register_hook(lambda g: self.tensors.__setitem__(f"factor/{samples[0]}", g.clone()))
            return
        for i, sample in enumerate(samples):
            self.tensors[f"forward/{layer}/{sample}"] = out.detach()[:, i].clone()

        def gradient(g: Tensor) -> None:
            for i, sample in enumerate(samples):
                self.tensors[f"backward/{layer}/{sample}"] = g[:, i].clone()

        if out.requires_grad:  # beside adapters an embedding has no gradient
            out.register_hook(gradient)

    def weights(self, pupil: Pupil, following: Delays) -> None:
        """The state after so many updates. following: delays of the iteration that will compute with it."""
        number = len(self.versions)
        now = pupil.tensors() if number else pupil.masters | pupil.biases  # moments exist after the first update
        self.tensors |= {f"state/{number}/{n}": t.clone().contiguous() for n, t in now.items()}
        computing = pupil.weights()
        for name, step in self.rule.ahead(following).items():
            values = pupil.logical(name, computing[name])
            values += step
            self.tensors[f"compute/{number}/{name}"] = values.clone()
        self.versions.append(computing)

    def update(self, pupil: Pupil, batch: Sequence[Microbatch], place: _Place) -> float:
        """One update by these samples; returns their mean loss."""
        number = len(self.versions)
        due = {layer: max(0, number - 1 - by) for layer, by in place.behind.items()}
        names = (*pupil.parameters, *pupil.biases, *pupil.scales)
        used = {n: self.versions[delay_of(due, n)][n] for n in names}
        loss, gradients = pupil.gradients(used, batch)
        self.tensors |= {f"gradient/{number}/{n}": g.contiguous().clone() for n, g in gradients.items()}
        self.rule.of_gradient = place.behind
        norm = None if place.skipped else pupil.update(gradients, place.scheduled)
        if place.skipped:
            self._skip(pupil, place.scheduled)
        self.taken += not place.skipped
        samples = [int(i) for mb in batch for i in mb.sample_ids]
        self.updates.append({"norm": norm, "samples": samples, "due": due, "taken": self.taken})
        self.weights(pupil, place.following)
        return loss

    def _skip(self, pupil: Pupil, scheduled: int) -> None:
        """What an update leaves that is not made: the numbers that the next one is foreseen with, and of histories of
        float8 a zero for the gradients, which were not finite."""
        self.rule.pass_over(
            learning_rates(pupil.config.optimizer, scheduled, pupil.samples, pupil.whole),
            decay_of(pupil.config.optimizer, scheduled, pupil.whole),
        )
        pupil.experts.counts.clear()
        for layer in pupil.float8.values():
            layer.seen[2] = 0.0
        pupil.scales = {f"{n}.fp8": layer.after_batch(pupil.scales[f"{n}.fp8"]) for n, layer in pupil.float8.items()}

    def write(self, folder: Path, pupil: Pupil, **more: Any) -> None:
        masks = pupil.rule.unsettled.items()  # of a weight, and of the last step, which is what moved it there
        unsettled = {f"unsettled/{of}{n}": mask.clone() for n, mask in masks for of in ("", f"optimizer/{LAST_STEP}/")}
        save_file(self.tensors | unsettled, str(folder / TENSORS))
        facts = {
            "layers": list(pupil.model.names),
            **more,
            "steps": self.steps,
            "updates": self.updates,
            "magnified": pupil.rule.magnified,
            "firsts": sorted(int(key.split("/")[1]) for key in self.tensors if key.startswith("loss/")),
        }
        (folder / FACTS).write_text(json.dumps(facts))


class Reference:
    """The numbers of a recorded run, read as they are asked for."""

    def __init__(self, folder: Path) -> None:
        facts = json.loads((folder / FACTS).read_text())
        self.layers: list[str] = facts["layers"]
        self.steps: list[dict[str, Any]] = facts["steps"]
        self.updates: list[dict[str, Any]] = facts["updates"]
        self.magnified: float = facts["magnified"]
        self.skipped: int = facts["skipped"]
        self.scales: list[float] = facts["scales"]
        self.tolerance: float = TOLERANCE * self.magnified
        file: Any = safe_open  # it has no annotations
        self._file = file(str(folder / TENSORS), framework="pt")
        self._names: set[str] = set(self._file.keys())
        self._step_of = {s: i for i, step in enumerate(self.steps) for s in range(*step["samples"])}
        self._update_of = {s: i + 1 for i, update in enumerate(self.updates) for s in update["samples"]}
        self._scales: dict[str, float] = {}

    def get(self, key: str) -> Tensor | None:
        found: Tensor | None = self._file.get_tensor(key) if key in self._names else None
        return found

    def part(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor | None:
        """A rectangle of a tensor."""
        whole = self.get(key)
        if whole is None:
            return None
        return whole[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]

    def computing(self, update: int, name: str) -> str:
        """The key of what is computed with after an update."""
        corrected = f"compute/{update}/{name}"
        return corrected if corrected in self._names else f"state/{update}/{name}"

    def names(self, prefix: str) -> list[str]:
        """What follows `prefix` in the names that begin with it."""
        return sorted(name[len(prefix) :] for name in self._names if name.startswith(prefix))

    def scale(self, prefix: str) -> float:
        """The largest number of all tensors whose names begin so."""
        if prefix not in self._scales:
            tensors = [self._file.get_tensor(prefix + name) for name in self.names(prefix)]
            self._scales[prefix] = max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)
        return self._scales[prefix]

    def step_of(self, sample: int) -> int | None:
        """The iteration (from 1) that a sample, or a sequence that was cut out of it, belongs to."""
        step = self._step_of.get(sample % PIECE)
        return None if step is None else step + 1

    def poisons(self, samples: Sequence[int]) -> bool:
        """Whether the gradient of these samples is to be made not finite: the last of the iteration that is skipped."""
        return self.skipped > 0 and self.steps[self.skipped - 1]["samples"][1] - 1 in samples

    def update_of(self, sample: int) -> int | None:
        """The update (from 1) that a sample's gradient goes into."""
        return self._update_of.get(sample)

    def step_of_update(self, update: int) -> int:
        """The iteration that an update (from 1) belongs to."""
        return self._step_of[self.updates[update - 1]["samples"][0]] + 1

    def due(self, layer: str, sample: int) -> int:
        """Updates that the weights have seen with which the layer computes the sample."""
        due: dict[str, int] = self.updates[self._update_of[sample] - 1]["due"]
        return due.get(layer, due.get("", 0))
