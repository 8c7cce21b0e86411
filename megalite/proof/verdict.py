"""What the ranks have found, put in order: the first tensor that differs, its layer, and the action that made it so.

A gradient that is wrong after its reduction was computed wrongly (backward) or reduced wrongly: the sum of what the
ranks held before decides. A sample that no rank has computed is a difference of the first layer that should have.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megalite.proof.reference import TOLERANCE, Reference
from megalite.proof.watch import BACKWARD, FORWARD, GRADIENT, LOSS, NORM, STEP, WEIGHTS

ORDER = (WEIGHTS, FORWARD, BACKWARD, GRADIENT, NORM, LOSS, STEP)
Found = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """The first one. action: start, forward, backward, reduce, norm, step or checkpoint."""

    step: int
    action: str
    layer: str
    tensor: str
    what: str

    def __str__(self) -> str:
        when = f"iteration {self.step}" if self.step else "before the first iteration"
        return f"{when}, {self.action} of {self.layer}: {self.tensor} {self.what}"


def first_difference(
    folder: Path, reference: Reference, seen: Sequence[dict[str, list[int]]], iterations: range, *, loaded: bool
) -> Difference | None:
    """Of one run of ranks, which computed `iterations`; loaded: it began with a checkpoint."""
    found = [json.loads(line) for path in folder.glob("found-*.jsonl") for line in path.read_text().splitlines()]
    if seen:
        found += _lost_samples(reference, seen, iterations)
    if not found:
        return None
    places = {layer: i for i, layer in enumerate(reference.layers)}

    def when(one: Found) -> tuple[Any, ...]:
        place = places.get(one["layer"], 0) * (-1 if one["kind"] in (BACKWARD, GRADIENT) else 1)
        return one["step"] or 0, ORDER.index(one["kind"]), place, one.get("sample", 0), one["rank"]

    return _name(min(found, key=when), folder, reference, before=iterations.start, loaded=loaded)


def _lost_samples(reference: Reference, seen: Sequence[dict[str, list[int]]], iterations: range) -> list[Found]:
    """Samples that a layer has not seen on any rank."""
    found = []
    for layer in reference.layers:
        counts = Counter(sample for rank in seen for sample in rank.get(layer, ()))
        for number in iterations:
            begin, end = reference.steps[number - 1]["samples"]
            lost = [sample for sample in range(begin, end) if not counts[sample]]
            if lost:
                most, times = max(((s, counts[s]) for s in range(begin, end)), key=lambda pair: pair[1])
                what = f"was never computed, while sample {most} was {times} times"
                where = {"step": number, "layer": layer, "sample": lost[0], "rank": 0}
                found.append({"kind": FORWARD, "tensor": f"sample {lost[0]}", "what": what, **where})
    return found


def _name(one: Found, folder: Path, reference: Reference, *, before: int, loaded: bool) -> Difference:
    kind, layer, tensor = one["kind"], one["layer"], one["tensor"]
    step = one["step"] or 0
    what = one.get("what") or f"on rank {one['rank']} {_amount(one)}"
    if loaded and step < before and kind in (WEIGHTS, FORWARD):
        return Difference(before - 1, "checkpoint", "the data", "what comes next", f"is of iteration {step} again")
    if kind == WEIGHTS:
        return _wrong_weights(one, what, reference, before=before if loaded else 0)
    if kind == STEP:
        return Difference(step, "checkpoint" if loaded and step < before else "step", layer, tensor, what)
    if kind == BACKWARD:
        after = reference.layers.index(layer) + 1
        if one["tensor"].startswith("factor/"):
            return Difference(step, "backward", layer, f"the weight of the loss of sample {one['sample']}", what)
        return Difference(
            step, "backward", reference.layers[after], f"the gradient of its input (sample {one['sample']})", what
        )
    if kind == FORWARD and "off" not in one and loaded and step == before:
        return Difference(step - 1, "checkpoint", "the data", tensor, what)  # what it says has been consumed
    if kind == FORWARD and "off" in one:
        name = "the loss" if tensor.startswith("loss/") else "its output"
        return Difference(step, "forward", layer, f"{name} (sample {one['sample']})", what)
    if kind == GRADIENT:
        right = _sum_was_right(folder, reference, tensor, one["update"])
        return Difference(step, "reduce" if right else "backward", layer, f"the gradient of {tensor}", what)
    if kind == NORM and "off" not in one:
        return Difference(step, "step", "the model", tensor, what)
    if kind == NORM:
        return Difference(step, "norm", "the model", "the gradient norm", what)
    if kind == LOSS:
        return Difference(step, "forward", layer, "the loss of the batch", what)
    return Difference(step, kind, layer, tensor, what)


def _wrong_weights(one: Found, what: str, reference: Reference, *, before: int) -> Difference:
    """Weights that a layer computes with: newer ones were chosen by the forward, all others were left by the step (its
    masters are right, or it would have been found itself), by the checkpoint or by the start. before: the first
    iteration after a checkpoint was loaded, or 0."""
    version, due = one.get("version"), one["due"]
    if version is not None and version != due:
        what += f", they are those after update {version}, due are those after {due}"
    if version is not None and version > due:
        return Difference(one["step"], "forward", one["layer"], one["tensor"], what)
    after = reference.step_of_update(due) if due else 0
    action = "checkpoint" if after < before else "step" if due else "start"
    return Difference(after, action, one["layer"], f"the compute weight {one['tensor']}", what)


def _amount(one: Found) -> str:
    factor = one.get("ratio")
    if factor is not None and abs(factor - 1) > TOLERANCE:
        return f"is {factor:.6g} times what it should be"
    return f"is off by {one['off']:.3g} (its largest number is {one['largest']:.3g})"


def _sum_was_right(folder: Path, reference: Reference, name: str, update: int) -> bool:
    """Whether what all ranks held before the reduction adds up to the gradient."""
    expected = reference.get(f"gradient/{update}/{name}")
    total = None if expected is None else torch.zeros_like(expected)
    if expected is None or total is None:
        return False
    for offset, values in _held(folder, name, update):
        total[tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))] += values
    return float((total - expected).abs().max()) <= reference.tolerance * max(float(expected.abs().max()), 1e-12)


def _held(folder: Path, name: str, update: int) -> Iterable[tuple[list[int], Tensor]]:
    for path in sorted(folder.glob(f"local-{update}-*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for key in file.keys():
                label, _, offset = key.partition("|")
                if label == name:
                    yield [int(n) for n in offset.split(",")], file.get_tensor(key)
