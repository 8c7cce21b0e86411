"""One rank of the configuration that is being proved: it trains, and compares what it computes as it computes it.

    layer's weights, output, gradient of its output     hooks on the layers      WEIGHTS, FORWARD, BACKWARD
    gradient before it is reduced                        tap_gradients            kept, to tell BACKWARD from REDUCE
    gradient after it is reduced, norm                   fault point `opt_step`   GRADIENT, NORM
    weights and moments after the step                   after every iteration    STEP

Nothing is sent: every rank reads the reference by itself and writes its findings down at once, so that they are there
even if it dies of what it found.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megalite.comm import TensorShard, World
from megalite.config import LossScaling, TrainingConfig, parse
from megalite.inventory import ParameterPlacement, layer_of, placement_of
from megalite.microbatch import Microbatch
from megalite.nn import LayerStack
from megalite.observe import StepStats
from megalite.optim import DynamicLossScaler, LossScaler
from megalite.proof.branches import FIRST_SCALE
from megalite.proof.gradient_taps import tap_gradients
from megalite.proof.reference import Reference
from megalite.testing import fault
from megalite.train import OpenRun, open_run

WEIGHTS, FORWARD, BACKWARD, GRADIENT, NORM, LOSS, STEP = (
    "weights", "forward", "backward", "gradient", "norm", "loss", "step",
)  # fmt: skip
ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward (input)",
    "W": "backward (weights)",
    "REDUCE": "reduce",
    "NORM": "norm",
    "STEP": "step",
}
FLOOR = 1e-3
"""A tensor counts as large as this part of the largest of its kind: beside it rounding is no difference."""


@dataclass
class Watch:
    """What a rank has found: the worst difference of every kind, and the samples that each layer has computed."""

    rank: int
    reference: Reference
    folder: Path
    worst: dict[str, float] = field(default_factory=dict)
    seen: dict[str, list[int]] = field(default_factory=dict)

    def compare(self, kind: str, key: str, found: Tensor, expected: Tensor | None, scale: float, **where: Any) -> bool:
        """Notes how far `found` is off, relative to the larger of the expected tensor and FLOOR x `scale`."""
        if expected is None or tuple(found.shape) != tuple(expected.shape):
            self.tell(kind, where, tensor=key, what="has no such place in one process")
            return False
        if not found.numel():
            return True
        size = max(float(expected.abs().max()), FLOOR * scale)
        error = float((found - expected).abs().max())
        relative = error / size if size else error
        self.worst[kind] = max(self.worst.get(kind, 0.0), relative) if math.isfinite(relative) else math.inf
        if relative <= self.reference.tolerance:
            return True
        self.tell(kind, where, tensor=key, off=error, largest=size, ratio=ratio(found, expected))
        return False

    def tell(self, kind: str, where: Mapping[str, Any], **facts: Any) -> None:
        with open(self.folder / f"found-{self.rank}.jsonl", "a") as file:
            file.write(json.dumps({"kind": kind, "rank": self.rank, **where, **facts}) + "\n")


def ratio(found: Tensor, expected: Tensor) -> float | None:
    """The number that `expected` has been multiplied with, if there is one."""
    square = float((expected * expected).sum())
    if not square:
        return None
    factor = float((found * expected).sum()) / square
    left = float((found - factor * expected).abs().max())
    return factor if left <= 1e-6 * float(expected.abs().max()) * max(1.0, abs(factor)) else None


def train(
    world: World, config_file: str, reference: str, folder: str, steps: int, save_after: int
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Trains up to iteration `steps` with a checkpoint after `save_after` of them; the worst differences by kind, and
    the samples that each layer has computed."""
    config = parse(["--config", config_file], world_size=world.size)
    watch = Watch(world.rank, Reference(Path(reference)), Path(folder))
    with scaled(watch.reference), open_run(config, world) as run:
        eyes = Eyes(run, watch, lambda doing: world.report_phase(f"iteration {run.trainer.iteration + 1}: {doing}"))
        eyes.states()
        eyes.older()
        while run.trainer.iteration < steps:
            number = run.trainer.iteration + 1
            stats = run.trainer.train_step(drain=number in (steps, save_after))
            eyes.after_step(stats)
            if number == save_after:
                run.state.save(run.trainer.progress)
    return watch.worst, watch.seen


@contextmanager
def scaled(reference: Reference) -> Iterator[None]:
    """The loss scale of fp16, for a run in fp64."""
    if len({*reference.scales}) == 1:
        yield
        return

    def scaler(_: TrainingConfig) -> LossScaler:
        return DynamicLossScaler(LossScaling(initial_loss_scale=FIRST_SCALE, loss_scale_window=1, hysteresis=1))

    with patch("megalite.train.run.build_scaler", scaler):
        yield


class Eyes:
    """Looks at an open run. phase: what the rank is doing, told to who supervises it."""

    def __init__(self, run: OpenRun, watch: Watch, phase: Callable[[str], None]) -> None:
        self.run, self.watch, self.reference, self.phase = run, watch, watch.reference, phase
        self.tp = run.trainer.mesh["tp"]
        self.local: dict[int, dict[str, Tensor]] = {}
        self._launched: dict[int, int] = {}
        self._checked: set[tuple[Any, ...]] = set()
        self._names: dict[int, str] = {}
        self._last = self.reference.layers[-1]
        self._before: nn.Module | None = None
        self._halves = run.trainer.config.parallel.tp_comm_overlap
        self._first_update = run.trainer.updater.newest_version()
        for stage in run.trainer.executor.stages.values():
            for module in stage.modules:
                self._listen(cast(LayerStack, module))
        for families in run.state.model.buffers.values():
            for family in families:
                tap_gradients(family, self._keep)
        fault.install([*fault.FAULTS, self])

    # layers

    def _listen(self, stack: LayerStack) -> None:
        names = {id(p): name for name, p in stack.logical_parameters()}
        for layer, module in zip(stack.names, stack.ordered(), strict=True):
            own = [(names[id(p)], p) for p in module.parameters() if id(p) in names and p.requires_grad]
            self._names[id(module)] = layer
            module.register_forward_pre_hook(
                lambda _, args, layer=layer, own=own: self._used(layer, args[0], args[1], own)
            )
            module.register_forward_hook(lambda _, args, out, layer=layer: self._computed(layer, args[0], args[1], out))

    def _used(self, layer: str, x: Any, microbatch: Microbatch, own: list[tuple[str, nn.Parameter]]) -> None:
        """The weights that a layer computes with: those of the right update?"""
        self._before = getattr(x, "unfinished", None)
        sample = int(microbatch.sample_ids[0])
        step = self.reference.step_of(sample)
        if step is None:
            return
        due = self.reference.due(layer, sample)
        number = self.reference.update_of(sample) or 0
        seen = (layer, number, *((id(p), p._version) for _, p in own))  # once, and once more where they have changed
        if seen in self._checked:
            return
        self._checked.add(seen)
        for name, p in own:
            found, offset = valid_part(p.detach(), placement_of(p))
            expected = self.reference.part(self.reference.computing(due, name), offset, found.shape)
            scale = self.reference.scale(f"state/{due}/{layer}")
            where = {"step": step, "layer": layer, "due": due, "version": self._version_of(name, found, offset)}
            self.watch.compare(WEIGHTS, name, self._settled(name, offset, found, expected), expected, scale, **where)

    def _version_of(self, name: str, found: Tensor, offset: tuple[int, ...]) -> int | None:
        """The update after which the weights were so."""
        for update in range(len(self.reference.updates) + 1):
            expected = self.reference.part(self.reference.computing(update, name), offset, found.shape)
            if expected is not None and found.numel() and bool(((found - expected).abs() <= 1e-12).all()):
                return update
        return None

    def _computed(self, layer: str, x: Any, microbatch: Microbatch, out: Tensor) -> None:
        samples = microbatch.sample_ids.tolist()
        if layer == self._last and isinstance(out, Tensor) and out.requires_grad and self.reference.poisons(samples):
            out.register_hook(lambda g: g * math.inf)
        if x is not None and not isinstance(x, Tensor):  # a turn of a half: it may have finished the block before
            self.watch.seen.setdefault(layer, []).extend(samples)
            if self._before is not None:
                self._computed(self._names[id(self._before)], None, microbatch, x.x)
            return
        if self.reference.step_of(samples[0]) is None:
            self.watch.tell(FORWARD, {"step": self.run.trainer.iteration + 1, "layer": layer, "sample": samples[0]},
                            tensor="batch", what="is no sample of these iterations")  # fmt: skip
            return
        self.watch.seen.setdefault(layer, []).extend(samples)
        self._compare(FORWARD, layer, samples, out.detach(), microbatch.places)
        if out.requires_grad:
            out.register_hook(lambda g: self._compare(BACKWARD, layer, samples, g, microbatch.places))

    def _compare(self, kind: str, layer: str, samples: list[int], values: Tensor, places: Tensor | None) -> None:
        if values.dim() == 0 and (self._halves or kind == FORWARD and places is not None):
            return  # a part of the loss
        step = self.reference.step_of(samples[0])
        where = {"step": step, "layer": layer}
        if kind == BACKWARD and step is not None:
            if step == self.reference.skipped:
                return  # not finite
            values = values / self.reference.scales[step - 1]
        if values.dim() == 0:
            key = f"{'loss' if kind == FORWARD else 'factor'}/{samples[0]}"
            self.watch.compare(kind, key, values, self.reference.get(key), 0.0, sample=samples[0], **where)
            return
        length = values.shape[0]
        prefix = f"{kind}/{layer}/"
        for i, sample in enumerate(samples):
            whole = self.reference.get(f"{prefix}{sample}")
            whole = whole[places] if whole is not None and places is not None else whole
            cut = whole is not None and whole.shape[0] != length  # sequence parallelism: this rank's tokens
            expected = whole[self.tp.rank * length :][:length] if whole is not None and cut else whole
            scale = float(whole.abs().max()) if whole is not None else 0.0
            self.watch.compare(kind, f"{prefix}{sample}", values[:, i], expected, scale, sample=sample, **where)

    def _settled(self, name: str, offset: tuple[int, ...], found: Tensor, expected: Tensor | None) -> Tensor:
        """`found`, where no update has followed the sign of a rounding (Lion, where a gradient is mathematically 0)."""
        unsettled = self.reference.part(f"unsettled/{name}", offset, found.shape)
        return found if unsettled is None or expected is None else torch.where(unsettled, expected, found)

    # gradients

    def _keep(self, bucket: Any) -> None:
        if bucket.gradient.streams:
            update = self.run.trainer.updater.newest_version() + 1
        else:
            self._launched[id(bucket)] = self._launched.get(id(bucket), 0) + 1
            update = self._first_update + self._launched[id(bucket)]
        kept = self.local.setdefault(update, {})
        for range_ in bucket.plan.ranges:
            place = range_.entry.placement
            if self.tp.rank and not place.sharded and not place.partial:
                continue  # all tensor-parallel ranks hold the same
            begin = range_.start - bucket.plan.start
            whole = bucket.gradient.full[begin : begin + range_.entry.numel].view(range_.entry.shape)
            values, offset = valid_part(whole, place)
            key = f"{range_.entry.name}|{','.join(map(str, offset))}"
            kept[key] = kept[key] + values if key in kept else values.clone()

    def reached(self, name: str, facts: Mapping[str, object]) -> None:
        """The product says where it is: `opt_step` comes after the norm and before the step."""
        if name == "action":
            self.phase(self._doing(str(facts["kind"]), facts["stage"], facts["microbatch"]))
        if name != "opt_step":
            return
        update = int(str(facts["update"])) + 1
        kept = self.local.pop(update, {})
        if update > len(self.reference.updates):
            return
        step, prefix = self.reference.step_of_update(update), f"gradient/{update}/"
        if step == self.reference.skipped:
            return  # not finite
        factor = self.reference.scales[step - 1]
        kept = {key: (values / factor).contiguous() for key, values in kept.items()}
        save_file(kept, str(self.watch.folder / f"local-{update}-{self.watch.rank}.safetensors"))
        for master in self.run.state.model.optimizer.masters:
            for shard in master.shards("", master.gradient, 0):
                where = {"step": step, "layer": layer_of(shard.name), "update": update}
                expected = self.reference.part(prefix + shard.name, shard.offset, shard.local.shape)
                found = shard.local / factor
                self.watch.compare(GRADIENT, shard.name, found, expected, self.reference.scale(prefix), **where)

    def _doing(self, kind: str, stage: object, microbatch: object) -> str:
        """An action in words."""
        layers = [
            name
            for (number, _), part in self.run.trainer.executor.stages.items()
            if number == stage
            for name in cast(LayerStack, part.modules[0]).names
        ]
        here = " .. ".join(dict.fromkeys((layers[0], layers[-1])))
        return f"{ACTIONS.get(kind, kind)} of {here}, micro-batch {microbatch}"

    # steps

    def after_step(self, stats: StepStats) -> None:
        """Loss and norm of the iteration, weights and moments after it."""
        where = {"step": stats.iteration, "layer": "head"}
        expected = torch.tensor(self.reference.steps[stats.iteration - 1]["loss"], dtype=torch.float64)
        assert stats.lm_loss is not None
        self.watch.compare(LOSS, "lm_loss", torch.as_tensor(stats.lm_loss).double(), expected, 0.0, **where)
        self._norm(stats, where)
        self.states()

    def _norm(self, stats: StepStats, where: dict[str, Any]) -> None:
        expected = self.reference.updates[stats.iteration - 1]["norm"]
        if self.run.state.model.together is not None:
            return  # there is none over PipeDream's pipeline
        if expected is None or stats.grad_norm is None:
            if expected is not stats.grad_norm:
                wrong = ("was skipped, though all is finite", "was taken, though a gradient is not finite")
                self.watch.tell(NORM, where, tensor="update", what=wrong[expected is None])
            return
        norm, found = (torch.tensor(float(value), dtype=torch.float64) for value in (expected, stats.grad_norm))
        self.watch.compare(NORM, "grad_norm", found, norm, 0.0, **where)

    def states(self) -> None:
        """Weights and moments as they are now, and what experts and scales of float8 have counted."""
        update, model = self.run.trainer.updater.newest_version(), self.run.state.model
        beside = [shard for state in model.states for shard in state.shards(update)]
        for shard in (*model.optimizer.shards(), *beside):
            if update or not shard.name.startswith("optimizer/"):  # what it is made with differs from rule to rule
                self._state(update, shard)

    def older(self) -> None:
        """What a checkpoint says of the weights before the newest ones, with which late gradients are computed."""
        update, model = self.run.trainer.updater.newest_version(), self.run.state.model
        for version in range(max(0, update - model.num_versions + 1), update):
            for shard in model.optimizer.version_shards(version, ""):
                expected = self.reference.part(
                    self.reference.computing(version, shard.name), shard.offset, shard.local.shape
                )
                local = self._settled(shard.name, shard.offset, shard.local, expected)
                where = {"step": self._step(update), "layer": layer_of(shard.name), "update": version}
                scale = self.reference.scale(f"state/{version}/layers")
                self.watch.compare(STEP, f"previous/{shard.name}", local, expected, scale, **where)

    def _step(self, update: int) -> int:
        return self.reference.step_of_update(update) if update else 0

    def _state(self, update: int, shard: TensorShard) -> None:
        where = {"step": self._step(update), "layer": layer_of(shard.name.split("/")[-1]), "update": update}
        if shard.name == "optimizer/step":
            taken = self.reference.updates[update - 1]["taken"]
            where["layer"] = "the model"
            self.watch.compare(STEP, shard.name, shard.local, torch.tensor(float(taken)), 0.0, **where)
            return
        expected = self.reference.part(f"state/{update}/{shard.name}", shard.offset, shard.local.shape)
        local = self._settled(shard.name, shard.offset, shard.local.double(), expected)
        if "_basis/" in shard.name and expected is not None:  # an eigenvector has no sign
            local, expected = local.abs(), expected.abs()
        kind = shard.name.rpartition("/")[0]
        scale = self.reference.scale(f"state/{update}/{kind}/" if kind else f"state/{update}/layers")
        self.watch.compare(STEP, shard.name, local, expected, scale, **where)


def valid_part(local: Tensor, place: ParameterPlacement) -> tuple[Tensor, tuple[int, ...]]:
    """(What of a local parameter lies inside the model, where it begins): padding left out."""
    shape = place.valid_shape(tuple(local.shape))
    offset = tuple(min(a, n) for a, n in zip(place.offset, place.global_shape, strict=True))
    return local[tuple(slice(0, n) for n in shape)], offset
