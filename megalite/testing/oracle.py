"""The single-process oracle: the same layers in a plain loop, with torch's own autograd and clipping and update rules
of its own (`update_rules.py`).

No executor, no schedule, no flat buffer, no process group: what every layout must equal.

    delay 0   synchronous: W(t+1) = W(t) - f(g(W(t)))
    delay 1   PipeDream-2BW (arXiv 2006.09503, section 3.1): W(t+1) = W(t) - f(g(W(t-1))), W(-1) = W(0)
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.func import functional_call

from megalite.comm import ParallelMesh, World
from megalite.config import parse
from megalite.gradient import GradSink, attach_sink, sink_of
from megalite.inventory import Recompute, layer_of, placement_of, stage_layer_ranges
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn import expert_biases
from megalite.parallel.tensor import LayerContext
from megalite.schedule import build_program
from megalite.testing.adapters import replace_adapters
from megalite.testing.experts import PlainExperts
from megalite.testing.float8 import PlainFloat8
from megalite.testing.further import plain_further
from megalite.testing.preconditioned import RULES
from megalite.testing.rates import decay_of, factors_of, learning_rates
from megalite.train.build import parameter_dtype
from megalite.train.run_data import open_data, resolve_tokenizer


@contextmanager
def one_thread() -> Iterator[None]:
    """As a rank of the tests computes: how many threads a normalisation's backward has decides in which order it adds
    up the gradients of its weight and bias."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Trajectory:
    """Losses and gradient norms (before clipping) of each step, weights and moments after the last.

    unsettled: elements whose update followed the sign of a rounding. magnified: how many times as much as AdamW the
    rule makes of a rounding.
    """

    losses: list[float]
    norms: list[float]
    tensors: dict[str, Tensor]
    unsettled: dict[str, Tensor] = field(default_factory=dict)
    magnified: float = 1.0


class Pupil:
    """The model, its data, its masters and the rule that steps them."""

    def __init__(self, argv: tuple[str, ...]) -> None:
        self.config, tokenizer = resolve_tokenizer(parse(list(argv)))
        self.data = open_data(self.config, ParallelMesh.single(), tokenizer, World(), earlier_requests=())
        self.dtype = parameter_dtype(self.config)
        context = LayerContext(dtype=self.dtype, seed=self.config.training.seed)
        self.specs = layer_specs(self.config.model)
        seed, nothing = self.config.training.seed, Recompute()  # backward runs outside of `functional_call`
        self.model = build_stack(self.config.model, self.specs, context, init_seed=seed, recompute=nothing)
        self.experts = PlainExperts(self.config.model)
        self.experts.replace(self.model)
        self.float8 = PlainFloat8.replace(self.model, self.config.training.float8)
        self.scales = {f"{name}.fp8": layer.past for name, layer in self.float8.items()}
        replace_adapters(self.model, self.config.model)
        self.parameters = {name: p for name, p in self.model.logical_parameters() if p.requires_grad}
        self.biases = {bias.name: bias.values for bias in expert_biases(self.model)}
        named = self.model.named_parameters()
        self.paths = {name: path for path, p in named for name, q in self.parameters.items() if p is q}
        wide = torch.promote_types(self.dtype, torch.float32)
        self.masters = {n: self.logical(n, p.detach()).to(wide, copy=True) for n, p in self.parameters.items()}
        settings = self.config.optimizer
        decayed = frozenset(n for n, p in self.parameters.items() if placement_of(p).decay)
        self.rule = RULES[settings.optimizer](self.masters, decayed, settings, factors_of(self.config, decayed))
        self.averages = {} if settings.ema_decay is None else {n: m.clone() for n, m in self.masters.items()}
        self.averaged = 0
        self.samples = self.config.global_batch_size(1)
        self.whole = self.config.train_iterations(1) * self.samples

    def logical(self, name: str, x: Tensor) -> Tensor:
        """The parameter without padding."""
        return x[tuple(slice(0, extent) for extent in placement_of(self.parameters[name]).global_shape)]

    def weights(self) -> dict[str, Tensor]:
        """What computes: the masters, padded and rounded, the biases of experts, and what makes scales of float8."""
        found = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}
        away = self.config.optimizer.store_param_remainders
        for name, master in self.masters.items():
            self.logical(name, found[name]).copy_(halves_away_from_zero(master) if away else master)
        return found | self.biases | self.scales

    @one_thread()
    def gradients(self, weights: dict[str, Tensor], samples: Sequence[Microbatch]) -> tuple[float, dict[str, Tensor]]:
        """The mean loss of the samples (over samples, or over tokens), and its gradient: what one update is made of."""
        used = {name: self._leaf(name, weights[name]) for name in self.parameters}
        by_path: dict[str, Tensor] = {self.paths[name]: leaf for name, leaf in used.items()}
        by_path |= {name: weights[name] for name in self.biases}
        for name, layer in self.float8.items():
            layer.past = weights[f"{name}.fp8"]
        tokens = [float(sample.loss_mask.sum()) for sample in samples]
        per_token = self.config.training.calculate_per_token_loss
        samples = plain_further(samples, self.config.model.further.depth, per_token=per_token)
        total = 0.0
        for sample, own in zip(samples, tokens, strict=True):
            loss = functional_call(self.model, by_path, (None, sample))
            loss = loss * (1 / sum(tokens) if per_token else 1 / (own * len(samples)))
            (loss + self.experts.take() / len(samples)).backward()
            total += float(loss.detach())
        return total, {name: self.logical(name, cast(GradSink, sink_of(leaf)).grad) for name, leaf in used.items()}

    def weight(self, samples: Sequence[Microbatch], batch: Sequence[Microbatch]) -> float:
        """Of the mean loss of some samples in that of their batch."""
        if not self.config.training.calculate_per_token_loss:
            return len(samples) / len(batch)
        here, all_of_them = (sum(float(sample.loss_mask.sum()) for sample in some) for some in (samples, batch))
        return here / all_of_them

    def _leaf(self, name: str, weight: Tensor) -> torch.nn.Parameter:
        """A copy that accumulates its gradient as the product's layers do, so that sums are rounded alike."""
        leaf = torch.nn.Parameter(weight.clone())
        wide = torch.promote_types(weight.dtype, torch.float32)
        attach_sink(leaf, self.rule.sink(name, torch.zeros_like(weight, dtype=wide)))
        return leaf

    def update(self, gradients: dict[str, Tensor], consumed: int) -> float:
        """Clips and steps with the numbers after `consumed` samples; the norm before clipping."""
        settings = self.config.optimizer
        norm = torch.nn.utils.get_total_norm([g.double() for g in gradients.values()])
        if settings.clip_grad:
            torch._foreach_mul_(list(gradients.values()), torch.clamp(settings.clip_grad / (norm + 1e-6), max=1.0))
        lr = learning_rates(settings, consumed, self.samples, self.whole)
        self.rule.step(gradients, lr, decay_of(settings, consumed, self.whole))
        self.averaged += 1
        for name, average in self.averages.items():
            decay = min(settings.ema_decay or 0.0, self.averaged / (self.averaged + 9))
            average.copy_(decay * average + (1 - decay) * self.masters[name])
        self.experts.move(self.biases)
        self.scales = {f"{n}.fp8": layer.after_batch(self.scales[f"{n}.fp8"]) for n, layer in self.float8.items()}
        return float(norm)

    def tensors(self) -> dict[str, Tensor]:
        """Under the names and in the shapes of a checkpoint."""
        moments = {f"optimizer/{label}/{name}": value.clone() for label, name, value in self.rule.moments()}
        moments |= {f"optimizer/ema/{name}": average.clone() for name, average in self.averages.items()}
        moments |= {f"optimizer/fp8/{name.removesuffix('.fp8')}": past for name, past in self.scales.items()}
        return {name: master.clone() for name, master in self.masters.items()} | self.biases | moments


@cache
def reference(argv: tuple[str, ...], steps: int, delay: int = 0, synchronous_steps: int = 0) -> Trajectory:
    """Trains the one-process configuration `argv` for `steps` iterations, the first of them without delay if asked."""
    pupil = Pupil(argv)
    versions = deque([pupil.weights()] * (delay + 1), maxlen=delay + 1)
    losses, norms = [], []
    with pupil.data.train_loader(0) as loader:
        for step in range(steps):
            weights = versions[-1] if step < synchronous_steps else versions[0]
            loss, gradients = pupil.gradients(weights, loader.next_batch(pupil.samples))
            losses.append(loss)
            norms.append(pupil.update(gradients, step * pupil.samples))
            versions.append(pupil.weights())
    return Trajectory(losses, norms, pupil.tensors(), pupil.rule.unsettled, pupil.rule.magnified)


@cache
def pipedream_reference(
    argv: tuple[str, ...], steps: int, stages: int, together: int = 1, lags: tuple[int, ...] = ()
) -> Trajectory:
    """PipeDream with weight stashing (Narayanan et al., SOSP 2019), micro-batch after micro-batch.

    Stage r computes micro-batch k, forward and backward, on the weights that it had after `k - (p-1-r)` updates, and
    then updates its newest ones with that gradient, whatever other micro-batches there are. together: samples of an
    update (micro-batch size x replicas). lags: of the stages, where they are not p-1-r (vertical sync; stages that
    differ).
    """
    pupil, lags = Pupil(argv), lags or tuple(stages - 1 - stage for stage in range(stages))
    cuts = stage_layer_ranges(pupil.config, build_program("pipedream", stages, 4))
    stage_of = {pupil.specs[i].name: stage for stage, cut in enumerate(cuts) for i in cut}
    lag = {name: lags[stage_of[layer_of(name)]] for name in pupil.weights()}
    history, losses = [pupil.weights()], []
    with pupil.data.train_loader(0) as loader:
        for step in range(steps):
            batch, total = loader.next_batch(pupil.samples), 0.0
            for begin in range(0, len(batch), together):
                k, samples = len(history) - 1, batch[begin : begin + together]
                weights = {n: history[max(0, k - lag[n])][n] for n in lag}
                loss, gradients = pupil.gradients(weights, samples)
                total += loss * pupil.weight(samples, batch)
                pupil.update(gradients, step * pupil.samples)
                history.append(pupil.weights())
            losses.append(total)
    return Trajectory(losses, [], pupil.tensors(), pupil.rule.unsettled, pupil.rule.magnified)


def halves_away_from_zero(master: Tensor) -> Tensor:
    """An fp32 number as the nearest bf16, of two the one further from zero."""
    toward_zero = (master.view(torch.int32) & -(1 << 16)).view(torch.float32)
    away = (toward_zero.view(torch.int32) + (1 << 16)).view(torch.float32)
    nearer = (away - master).abs() <= (master - toward_zero).abs()
    return torch.where(nearer, away, toward_zero).to(torch.bfloat16)
