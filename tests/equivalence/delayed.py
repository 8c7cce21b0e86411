"""Training on delayed gradients with every `--staleness-correction`, one process, one loop, plain tensors: the formulas
once more, sharing nothing with `megalite.optim`. (`x.add(y, alpha=a)` is rounded once, as the product's is.)

    d            updates that the weights of a gradient lack: 1 in 2BW, p-1-r on stage r of PipeDream
    g(t)         at the compute weights of version max(t - d, 0)
    none         compute weights = masters W
    predict      compute weights = W + s d E, E: the step that the moments stand for, else the last one
    error-feedback   Z = W - d D;  Z' = one step of the rule from Z;  D' = Z' - Z;  W' = Z' + d D'
    nesterov     the rule with Nesterov's momentum
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import functional_call

from megalite.comm import World
from megalite.comm.mesh import ParallelMesh
from megalite.config import Config, parse
from megalite.gradient import GradSink, attach_sink
from megalite.inventory.pipeline import stage_layer_ranges
from megalite.models import build_stack, layer_specs
from megalite.parallel.tensor.context import LayerContext
from megalite.schedule import build_program
from megalite.train.build import parameter_dtype
from megalite.train.run_data import open_data, resolve_tokenizer

Named = dict[str, Tensor]


@dataclass
class Numbers:
    """What a rule is given beside the gradient."""

    config: Config
    lr: float
    weight_decay: float
    step: int
    nesterov: bool
    whole: bool


@dataclass
class Parameter:
    """One parameter: its master, the rule's state, what the last step added."""

    w: Tensor
    decay: bool
    whole: bool
    state: Named = field(default_factory=dict)
    last: Tensor | None = None
    numbers: Numbers | None = None


def adamw(w: Tensor, g: Tensor, s: Named, n: Numbers) -> None:
    """Loshchilov and Hutter, arXiv 1711.05101; with Nesterov's momentum: Dozat 2016."""
    args = n.config.optimizer.args
    b1, b2 = args.adam_beta1, args.adam_beta2
    m, v = s.setdefault("exp_avg", torch.zeros_like(w)), s.setdefault("exp_avg_sq", torch.zeros_like(w))
    if not n.nesterov:  # torch's kernel, so that not one bit may differ
        counted = torch.tensor(float(n.step - 1))
        rates = {"lr": n.lr, "weight_decay": n.weight_decay, "eps": args.adam_eps, "beta1": b1, "beta2": b2}
        flags = {"amsgrad": False, "maximize": False, "fused": True}
        torch.optim._functional.adamw([w], [g], [m], [v], [], [counted], **flags, **rates)
        return
    m.mul_(b1).add_(g, alpha=1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    ahead = m * (b1 / (1 - power(b1, n.step + 1))) + g * ((1 - b1) / (1 - power(b1, n.step)))
    w *= 1 - n.lr * n.weight_decay
    w.add_(ahead / (v.sqrt() / (1 - power(b2, n.step)).sqrt() + args.adam_eps), alpha=-n.lr)


def adamw_expects(w: Tensor, s: Named, n: Numbers, weight_decay: float) -> Tensor:
    args = n.config.optimizer.args
    m, v = s["exp_avg"] / (1 - power(args.adam_beta1, n.step)), s["exp_avg_sq"]
    direction = m / (v.sqrt() / (1 - power(args.adam_beta2, n.step)).sqrt() + args.adam_eps)
    return -n.lr * direction.add(w, alpha=weight_decay)


def sgd(w: Tensor, g: Tensor, s: Named, n: Numbers) -> None:
    g = g.add(w, alpha=n.weight_decay)
    momentum = n.config.optimizer.args.sgd_momentum
    s["m"] = momentum * s.get("m", torch.zeros_like(w)) + g
    w.add_(g.add(s["m"], alpha=momentum) if n.nesterov else s["m"], alpha=-n.lr)


def sgd_expects(w: Tensor, s: Named, n: Numbers, weight_decay: float) -> Tensor:
    return -n.lr * s["m"]


def lion(w: Tensor, g: Tensor, s: Named, n: Numbers) -> None:
    """Chen et al., arXiv 2302.06675."""
    args, m = n.config.optimizer.args, s.get("m", torch.zeros_like(w))
    w *= 1 - n.lr * n.weight_decay
    w -= n.lr * torch.lerp(m, g, 1 - args.lion_beta1).sign()
    s["m"] = torch.lerp(m, g, 1 - args.lion_beta2)


def lion_expects(w: Tensor, s: Named, n: Numbers, weight_decay: float) -> Tensor:
    return -n.lr * s["m"].sign().add(w, alpha=weight_decay)


def muon(w: Tensor, g: Tensor, s: Named, n: Numbers) -> None:
    """kellerjordan.github.io/posts/muon, with the size of arXiv 2502.16982; AdamW for what is no matrix of a block."""
    if not n.whole:
        return adamw(w, g, s, n)
    mu = n.config.optimizer.args.muon_momentum
    s["m"] = mu * s.get("m", torch.zeros_like(w)) + g
    x = g + mu * s["m"]
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    w *= 1 - n.lr * n.weight_decay
    w.add_(x.mT if tall else x, alpha=-n.lr * (0.2 * max(w.shape[-2:]) ** 0.5))
    return None


def adafactor(w: Tensor, g: Tensor, s: Named, n: Numbers) -> None:
    """Shazeer and Stern, arXiv 1804.04235, without a first moment and with AdamW's weight decay."""
    decay = 1 - n.step**-0.8
    squared = g.square()
    if w.dim() >= 2 and n.whole:
        for label, mean in (("row", squared.sum(-1) / w.shape[-1]), ("column", squared.sum(-2) / w.shape[-2])):
            s[label] = decay * s.get(label, torch.zeros_like(mean)) + (1 - decay) * (mean + 1e-30)
        average = s["column"].mean(-1, keepdim=True)
        u = g * (s["row"] / average).rsqrt()[..., None] * s["column"].rsqrt()[..., None, :]
    else:
        s["all"] = decay * s.get("all", torch.zeros_like(w)) + (1 - decay) * (squared + 1e-30)
        u = g * s["all"].rsqrt()
    size = float((torch.linalg.vector_norm(u).square() / u.numel()).sqrt())
    w *= 1 - n.lr * n.weight_decay
    w -= (n.lr / max(1.0, size)) * u


def power(beta: float, count: int) -> Tensor:
    return beta ** torch.tensor(float(count), dtype=torch.float64)


RULES: Mapping[str, Callable[[Tensor, Tensor, Named, Numbers], None]] = {
    "adam": adamw, "sgd": sgd, "lion": lion, "muon": muon, "adafactor": adafactor,
}  # fmt: skip
EXPECTS: Mapping[str, Callable[[Tensor, Named, Numbers, float], Tensor]] = {
    "adam": adamw_expects, "sgd": sgd_expects, "lion": lion_expects, "muon": adamw_expects,
}  # fmt: skip


class Reference:
    """argv: of one process and micro-batches of one sample, learning rate decaying linearly to 0 over the training.

    lookahead: of predict, of the optimizer's own tensors and of those that Muon leaves to AdamW. stages: of PipeDream;
    None is 2BW.
    """

    def __init__(
        self, argv: Sequence[str], *, method: str, lookahead: Sequence[float] = (0.0,), stages: int | None = None
    ) -> None:
        self.config, tokenizer = resolve_tokenizer(parse(list(argv)))
        self.method, self.lookahead, self.per_microbatch = method, lookahead, stages is not None
        self.data = open_data(self.config, ParallelMesh.single(), tokenizer, World(), earlier_requests=())
        context = LayerContext(dtype=parameter_dtype(self.config), seed=self.config.training.seed)
        specs = layer_specs(self.config.model)
        self.model = build_stack(self.config.model, specs, context, init_seed=self.config.training.seed)
        logical = dict(self.model.logical_parameters())
        self.paths = {n: path for path, p in self.model.named_parameters() for n, q in logical.items() if p is q}
        optimizer = self.config.optimizer.optimizer
        self.parameters = {
            name: Parameter(
                p.detach().clone(),
                p.placement.decay,
                p.placement.decay if optimizer == "adafactor" else name.startswith("layers.") and p.dim() >= 2,
            )
            for name, p in logical.items()
        }
        self.delay = dict.fromkeys(logical, 1)
        if stages is not None:
            cuts = stage_layer_ranges(self.config, build_program("pipedream", stages, 4))
            stage_of = {specs[i].name: stage for stage, cut in enumerate(cuts) for i in cut}
            owner = {n: ".".join(n.split(".")[: 2 if n.startswith("layers.") else 1]) for n in logical}
            self.delay = {name: stages - 1 - stage_of[owner[name]] for name in logical}

    def run(self, steps: int, synchronous_steps: int = 0) -> list[float]:
        """Trains; returns the losses."""
        losses, history = [], [self.compute_weights(delayed=False)]
        with self.data.train_loader(0) as loader:
            for step in range(steps):
                batch, total = loader.next_batch(self.config.global_batch_size(1)), 0.0
                delayed = step >= synchronous_steps
                for samples in [[sample] for sample in batch] if self.per_microbatch else [batch]:
                    updates = len(history) - 1
                    lag = {name: d if delayed else 0 for name, d in self.delay.items()}
                    weights = {n: history[max(0, updates - lag[n])][n] for n in lag}
                    loss, gradients = self.gradients(weights, samples)
                    total += loss * len(samples) / len(batch)
                    self.update(gradients, step, updates + 1, lag)
                    last = samples[-1] is batch[-1]
                    history.append(self.compute_weights(delayed=step + last >= synchronous_steps))
                losses.append(total)
        return losses

    def gradients(self, weights: Named, samples) -> tuple[float, Named]:
        used = {name: torch.nn.Parameter(w.clone()) for name, w in weights.items()}
        for leaf in used.values():  # sums of micro-batches are rounded as the product's
            attach_sink(leaf, GradSink(torch.zeros_like(leaf)))
        total = 0.0
        for sample in samples:
            loss = functional_call(self.model, {self.paths[n]: w for n, w in used.items()}, (None, sample))
            loss = loss * (1 / (float(sample.loss_mask.sum()) * len(samples)))
            loss.backward()
            total += float(loss.detach())
        return total, {name: leaf.sink.grad for name, leaf in used.items()}

    def update(self, gradients: Named, step: int, number: int, lag: Mapping[str, int]) -> None:
        settings = self.config.optimizer
        if settings.clip_grad:
            norm = float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
            gradients = {name: g * min(1.0, settings.clip_grad / (norm + 1e-6)) for name, g in gradients.items()}
        lr = settings.lr * (1 - step / self.config.train_iterations(1))
        for name, p in self.parameters.items():
            nesterov = self.method == "nesterov" and lag[name] > 0
            decay = settings.weight_decay if p.decay else 0.0
            p.numbers = Numbers(self.config, lr, decay, number, nesterov, p.whole)
            feedback = float(lag[name]) if self.method == "error-feedback" else 0.0
            if feedback and p.last is not None:
                p.w -= feedback * p.last
            before = p.w.clone()
            RULES[settings.optimizer](p.w, gradients[name], p.state, p.numbers)
            p.last = p.w - before
            if feedback:
                p.w += feedback * p.last

    def compute_weights(self, *, delayed: bool) -> Named:
        settings, found = self.config.optimizer, {}
        for name, p in self.parameters.items():
            steps = self.lookahead[0 if p.whole or settings.optimizer != "muon" else -1]
            ahead = steps * self.delay[name] if delayed and self.method == "predict" else 0.0
            if not ahead or p.numbers is None:
                found[name] = p.w.clone()
                continue
            keeps = settings.optimizer not in EXPECTS or (settings.optimizer == "muon" and p.whole)
            expected = p.last if keeps else EXPECTS[settings.optimizer](p.w, p.state, p.numbers, p.numbers.weight_decay)
            found[name] = p.w.add(expected, alpha=ahead)
        return found
