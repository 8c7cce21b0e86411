"""The single-process oracle: the same layers in a plain loop, with torch's own autograd, clipping and AdamW.

No executor, no schedule, no flat buffer, no process group: what every layout must equal.

    delay 0   synchronous: W(t+1) = W(t) - f(g(W(t)))
    delay 1   PipeDream-2BW (arXiv 2006.09503, section 3.1): W(t+1) = W(t) - f(g(W(t-1))), W(-1) = W(0)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.func import functional_call

from megalite.comm import ParallelMesh
from megalite.config import Config, parse
from megalite.gradient import GradSink, attach_sink, sink_of
from megalite.inventory import Placement, stage_cuts
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.parallel.tensor import LayerContext
from megalite.schedule import build
from megalite.train.build import parameter_dtype
from megalite.train.run_data import open_data, resolve_tokenizer


@dataclass(frozen=True)
class Trajectory:
    """Losses and gradient norms (before clipping) of each step, weights and moments after the last."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, Tensor]


@cache
def reference(argv: tuple[str, ...], steps: int, delay: int = 0, synchronous_steps: int = 0) -> Trajectory:
    """Trains the one-process configuration `argv` for `steps` iterations, the first of them without delay if asked."""
    config, tokenizer = resolve_tokenizer(parse(list(argv)))
    data = open_data(config, ParallelMesh.single(), tokenizer, torch.device("cpu"), began_with=())
    context = LayerContext(dtype=parameter_dtype(config), seed=config.training.seed)
    model = build_stack(config.model, layer_specs(config.model), context, init_seed=config.training.seed)
    parameters = dict(model.logical_parameters())
    paths = {name: path for path, p in model.named_parameters() for name, q in parameters.items() if p is q}
    optimizer = _optimizer(config, parameters)
    versions = deque([_snapshot(parameters)] * (delay + 1), maxlen=delay + 1)
    samples = config.global_batch_size(1)
    losses, norms = [], []
    with data.train_loader(0) as loader:
        for step in range(steps):
            weights = versions[-1] if step < synchronous_steps else versions[0]
            used = {name: _leaf(w) for name, w in weights.items()}
            losses.append(_accumulate(config, model, paths, used, loader.next_batch(samples)))
            for name, p in parameters.items():
                p.grad = gradient_of(used[name])
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), config.optimizer.clip_grad or 1e30)))
            optimizer.step()
            versions.append(_snapshot(parameters))
    return Trajectory(losses, norms, _tensors(parameters, optimizer))


@cache
def pipedream_reference(argv: tuple[str, ...], steps: int, stages: int) -> Trajectory:
    """PipeDream with weight stashing (Narayanan et al., SOSP 2019), micro-batch after micro-batch.

    Stage r computes micro-batch k, forward and backward, on the weights that it had after `k - (p-1-r)` updates, and
    then updates its newest ones with that gradient.
    """
    config, tokenizer = resolve_tokenizer(parse(list(argv)))
    data = open_data(config, ParallelMesh.single(), tokenizer, torch.device("cpu"), began_with=())
    context = LayerContext(dtype=parameter_dtype(config), seed=config.training.seed)
    specs = layer_specs(config.model)
    model = build_stack(config.model, specs, context, init_seed=config.training.seed)
    parameters = dict(model.logical_parameters())
    paths = {name: path for path, p in model.named_parameters() for name, q in parameters.items() if p is q}
    program = build("pipedream", stages, 4)
    cuts = stage_cuts(config, program)
    stage_of = {specs[i].name: stage for stage, cut in enumerate(cuts) for i in cut}
    lag = {name: stages - 1 - stage_of[_layer(name)] for name in parameters}
    history = [_snapshot(parameters)]
    optimizer = _optimizer(config, parameters)
    samples, losses = config.global_batch_size(1), []
    with data.train_loader(0) as loader:
        for _ in range(steps):
            batch, total = loader.next_batch(samples), 0.0
            for microbatch in batch:
                k = len(history) - 1
                used = {n: _leaf(history[max(0, k - lag[n])][n]) for n in parameters}
                total += _accumulate(config, model, paths, used, [microbatch], share=1 / len(batch))
                for name, p in parameters.items():
                    p.grad = gradient_of(used[name])
                optimizer.step()
                history.append(_snapshot(parameters))
            losses.append(total)
    return Trajectory(losses, [], _tensors(parameters, optimizer))


def _leaf(weight: Tensor) -> torch.nn.Parameter:
    """A copy that accumulates its gradient as the product's layers do, so that sums are rounded alike."""
    leaf = torch.nn.Parameter(weight.clone())
    attach_sink(leaf, GradSink(torch.zeros_like(weight)))
    return leaf


def gradient_of(leaf: Tensor) -> Tensor:
    """What has been accumulated for a leaf."""
    sink = sink_of(leaf)
    assert sink is not None
    return sink.grad


def _layer(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def _accumulate(
    config: Config,
    model: torch.nn.Module,
    paths: Mapping[str, str],
    used: Mapping[str, Tensor],
    microbatches: Sequence[Microbatch],
    share: float = 1.0,
) -> float:
    total_tokens = sum(float(mb.loss_mask.sum()) for mb in microbatches)
    loss_of_batch = 0.0
    for batch in microbatches:
        own = float(batch.loss_mask.sum())
        weight = 1 / total_tokens if config.training.calculate_per_token_loss else 1 / (own * len(microbatches))
        weight *= share
        loss = functional_call(model, {paths[name]: w for name, w in used.items()}, (None, batch)) * weight
        loss.backward()
        loss_of_batch += float(loss.detach())
    return loss_of_batch


def _optimizer(config: Config, parameters: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    settings = config.optimizer
    decayed = [p for p in parameters.values() if placement_of(p).decay]
    others = [p for p in parameters.values() if not placement_of(p).decay]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (settings.args.adam_beta1, settings.args.adam_beta2)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.args.adam_eps, fused=True)


def placement_of(parameter: Tensor) -> Placement:
    """Where the parameter lies in the model."""
    placement: Placement = parameter.placement  # type: ignore[attr-defined]  # ours, on a tensor of torch's
    return placement


def _snapshot(parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in parameters.items()}


def _tensors(parameters: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Under the names and in the shapes of a checkpoint: padding cut off."""
    found = {}
    for name, p in parameters.items():
        inside = tuple(slice(0, extent) for extent in placement_of(p).global_shape)
        found[name] = p.detach()[inside].clone()
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer/{moment}/{name}"] = optimizer.state[p][moment][inside].clone()
    return found
