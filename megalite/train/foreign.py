"""`--model-module`: somebody's module in place of our families, in a run like any other.

    factory -> module -> layers (megalite.library) -> stages that read tokens and return the summed loss

Every rank makes the whole module with the same values and keeps the layers of its stages. Checkpoints hold the module's
own names. What it draws in training (dropout) is keyed by (seed, layer, first sample of the micro-batch), so that a
resumed run draws what the run without a break would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from megalite.comm import Axis, ContextAxes, ParallelMesh, TensorShard
from megalite.config import Config
from megalite.engine import BuiltStages
from megalite.errors import ConfigError
from megalite.inventory import given_plan, placement_of, recompute_ranges
from megalite.library import (
    Parts,
    Ranges,
    Sample,
    Sequences,
    StageModule,
    TracedLayer,
    draws,
    layers_over,
    module_of,
    still_shards,
)
from megalite.microbatch import Microbatch
from megalite.schedule import Program

BACKWARD = 2  # products of a backward, in those of its forward
MOST_PARAMETERS = 1 << 26  # of larger modules no copy is made
MOST_PRODUCTS = 10**10  # parameters times tokens above which two forwards take long (on one core more than a second)
NOISE = 16  # roundings, in units of the precision, that other shapes inside the module may make (tokens of each expert)


@dataclass(frozen=True)
class ModuleInput(Microbatch):
    """A micro-batch for layers whose messages have shapes of their own."""

    def arranged(self, x: Tensor) -> Tensor:
        return x

    @classmethod
    def of(cls, microbatch: Microbatch) -> ModuleInput:
        return cls(**{each.name: getattr(microbatch, each.name) for each in fields(Microbatch) if each.init})


class TokenStage(StageModule):
    """A stage that reads the tokens of a micro-batch; the last one returns the summed loss."""

    seed: int | None = None  # of what its layers draw, None where they draw nothing

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> Tensor:  # type: ignore[override]  # made to a Sample
        """`x` is None on the first stage."""
        number = int(microbatch.sample_ids[0]) if self.seed is not None and self.training else None
        return super().forward(x, Sample((microbatch.tokens,), microbatch, number, microbatch))

    def before(self, layer: int, sample: Sample) -> None:
        """Begins torch's generators at a key of the layer's own."""
        if sample.number is not None and sample.microbatch is not None:
            places = sample.microbatch.places
            own = "" if places is None else f" {int(places[0])}"
            torch.manual_seed(xxhash.xxh3_64_intdigest(f"{self.seed} {layer} {sample.number}{own}".encode()) >> 1)


def summed_loss(logits: Tensor, microbatch: Microbatch) -> Tensor:
    """Cross entropy of the next tokens, in fp32 or wider, summed where the loss mask is 1."""
    wide = torch.promote_types(torch.float32, logits.dtype)
    losses = F.cross_entropy(logits.flatten(0, 1).to(wide), microbatch.labels.flatten(), reduction="none")
    if microbatch.token_losses is not None:
        microbatch.token_losses.copy_(losses.detach().view_as(microbatch.labels))
    return (losses * microbatch.loss_mask.flatten().to(wide)).sum()


class ForeignModel:
    """The module of `--model-module` as layers, cut over the stages of a program.

    axis: the tensor-parallel ranks. device: `meta`, to look at it only. dtype: of parameters. cp: ranks that share a
    sequence. probe: ask whether it reads later tokens, where that is cheap.
    cuts: the layers of each stage. held: (name, local shape, placement) of what learns in each stage, each once.
    still: what of this rank's stages no update changes: buffers that are saved, and parameters that do not learn.
    leak: what `probe` found. Raises ConfigError in one line for whatever cannot be done with it.
    """

    def __init__(
        self,
        config: Config,
        axis: Axis,
        program: Program,
        device: torch.device,
        dtype: torch.dtype,
        cp: ContextAxes,
        *,
        probe: bool,
    ) -> None:
        self.name, self._config, size = config.model.module.model_module or "", config, axis.size
        self.dtype = dtype
        shape = config.training.micro_batch_size, config.model.seq_length
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        look = device.type == "meta"
        module = made(config, look=look)
        check_parameters(self.name, module, look=look)
        module = cast(module, dtype).train()
        copy = small_copy(module, shape) if probe else None
        try:
            table = config.model.module.table if size > 1 else {}
            sequences = Sequences(config.data.reset_attention_mask, cp)
            layers = layers_over(axis, module, (tokens,), table, sequences, ids=config.model.vocab_size)
            self.parts = Parts(layers, sequences.share((tokens,)), program, device)
        except ConfigError as error:
            raise ConfigError(f"`model_module`={self.name}: {_in_flags(str(error))}") from None
        self._check_logits((shape[0], shape[1] // sequences.cp.size, config.model.vocab_size))
        self.leak = reads_ahead(copy, shape, config.model.vocab_size) if copy is not None else None
        if program.update_per_microbatch and self.parts.tied:
            raise ConfigError(
                f"`pipeline_schedule`={program.name}: {', '.join(sorted(self.parts.tied))} would drift apart: several "
                "stages of `model_module` share it; use 2bw"
            )
        self.cuts, self.still = self.parts.cuts, list[TensorShard]()
        learn = [
            dict.fromkeys(p for i in items for p in self.parts.layers[i].parameters() if p.requires_grad)
            for items in self.parts.cuts
        ]
        self.held = [[(self.parts.names.of(p), tuple(p.shape), placement_of(p)) for p in own] for own in learn]
        samples = config.training.micro_batch_size
        ranks = size * sequences.cp.size
        self.flops_per_sample = (1 + BACKWARD) * ranks * sum(layer.flops for layer in self.parts.found) / samples

    def count(self, stages: Iterable[int]) -> int:
        """Elements of the logical tensors that learn in these stages, each once."""
        found = {name: place.global_shape for stage in stages for name, _, place in self.held[stage]}
        return sum(map(math.prod, found.values()))

    def ranges(self, stage: int) -> Ranges:
        count = len(self.cuts[stage])
        return recompute_ranges(count, range(count), given_plan(self._config).recompute_of(stage))

    def build(self, mesh: ParallelMesh) -> BuiltStages:
        """This rank's stages and their modules, one for each weight version; the layers of others are let go. All are
        made before one's memory is shared out: two may hold the same parameters."""
        rank, built = mesh.coordinate("pp"), BuiltStages()
        for key in self.parts.program.placement.stages_of(rank):
            ranges, offloaded = self.ranges(key[0]), self._config.model.cpu_offloading_num_layers
            stage, modules = self.parts.stage(key, summed_loss, ranges, TokenStage, offloaded)
            found = [module for module in modules if isinstance(module, TokenStage)]
            random = any(draws(layer) for layer in found[0].layers)
            for module in found:
                module.seed = self._config.training.seed if random else None
                # Every layer by itself. Linear layers stay eager, as in our own blocks: they compute weight gradients
                # when the schedule says so. Graphs are code of their own, none counts as another compilation of one.
                for layer in module.layers if self._config.training.compile else ():
                    if isinstance(layer, TracedLayer):
                        layer.body.compile()
            built[key] = stage, found
        self.parts.layers.clear()
        self.still = list(still_shards(self.parts, mesh))
        return built

    def _check_logits(self, wanted: tuple[int, ...]) -> None:
        spec = self.parts.found[-1].boundary.specs[0]
        found = spec.shape
        if len(found) != 3 or found[:2] != wanted[:2]:
            raise ConfigError(
                f"`model_module`={self.name}: returns {list(found)} for tokens [{wanted[0]}, {wanted[1]}]; logits "
                f"[{wanted[0]}, {wanted[1]}, vocabulary] are wanted"
            )
        if found[2] < wanted[2]:
            raise ConfigError(
                f"`model_module`={self.name}: returns logits of {found[2]:,} ids, the tokenizer has {wanted[2]:,}; let "
                "the factory take vocab_size, or give the tokenizer of the model"
            )


def check_parameters(name: str, module: nn.Module, *, look: bool) -> None:
    """Raises ConfigError where there is nothing to train, or no values to begin with."""
    learns = False
    for label, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"`model_module`={name}: {label} is lazy and has no shape yet; call the module once in the factory"
            )
        if parameter.is_meta and not look:
            raise ConfigError(f"`model_module`={name}: {label} is on meta, without values; make it on the CPU")
        learns = learns or parameter.requires_grad
    if not learns:
        what = "no parameter that learns (requires_grad)" if any(True for _ in module.parameters()) else "no parameters"
        raise ConfigError(f"`model_module`={name}: {type(module).__name__} has {what}; there is nothing to train")


def made(config: Config, *, look: bool) -> nn.Module:
    """What the factory makes. look: on `meta`, unless it does more than make parameters."""
    model, name = config.model, config.model.module.model_module or ""
    make = partial(module_of, name, seed=config.training.seed, vocab_size=model.vocab_size, seq_length=model.seq_length)
    if look:
        with suppress(ConfigError), torch.device("meta"):  # it reads values, perhaps those of a file
            return make()
    return make()


def _in_flags(text: str) -> str:
    """Messages of the library, in the words of the command."""
    text = text.replace("tensor_parallel:", "`tensor_parallel_globs`:").replace(
        "tensor_parallel?", "`tensor_parallel_globs`?"
    )
    text = text.replace("give more layers, or fewer ranks", "use a smaller `pipeline_model_parallel_size`")
    return text.replace("cut the layers otherwise (sizes=...)", "use another `pipeline_model_parallel_size`")


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with its parameters, and what of its buffers a state dict holds, in another precision. What is worked
    out from sizes (rotary frequencies) stays as precise as it is."""
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point() and name not in part._non_persistent_buffers_set:
                part._buffers[name] = buffer.to(dtype)
    return module


def small_copy(module: nn.Module, shape: tuple[int, int]) -> nn.Module | None:
    """What `reads_ahead` asks, in evaluation mode and in fp32 at least; None of a module without values, of one that
    is large, and of one that cannot be copied. shape: [b, s] of a micro-batch."""
    states = [*module.parameters(), *module.buffers()]
    size = sum(parameter.numel() for parameter in module.parameters())
    if any(state.is_meta for state in states) or size > MOST_PARAMETERS or size * math.prod(shape) > MOST_PRODUCTS:
        return None
    try:
        copy = deepcopy(module).eval()
    except Exception:  # whatever somebody's module holds
        return None
    half = any(state.dtype in (torch.float16, torch.bfloat16) for state in states)
    return copy.float() if half else copy


def reads_ahead(copy: nn.Module, shape: tuple[int, int], vocab_size: int) -> str | None:
    """Does a module of the user's own read later tokens? A language model that does has seen what it is to foretell:
    its loss falls quickly and means nothing. How far the logits before the last token move when that token changes,
    with the same draws both times; None if they do not, and of a module that fails."""
    if vocab_size < 2 or shape[1] < 2:
        return None
    device = next((state.device for state in [*copy.parameters(), *copy.buffers()]), torch.device("cpu"))
    tokens = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1)).to(device)
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % vocab_size
    try:
        logits, moved = _logits(copy, tokens)[:, :-1], _logits(copy, other)[:, :-1]
    except Exception:  # whatever somebody's module raises; it was traced, so a run may still do
        return None
    furthest, largest = float((moved - logits).abs().max()), float(logits.abs().max())
    return f"by {furthest:.1e} of {largest:.1e}" if furthest > NOISE * torch.finfo(logits.dtype).eps * largest else None


def _logits(module: nn.Module, tokens: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(1)
        found: Any = module(tokens)
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits
