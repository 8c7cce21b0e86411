"""A checkpoint, whatever layout wrote it, or a Hugging Face folder as a model at any layout: for generation,
evaluation and export.

Both are self-contained: configuration, weights by name, and the tokenizer's files. Nothing else of a run is needed, and
nothing of it is changed. Each rank reads what it holds.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from megalite.checkpoint import CheckpointReader, Meta, is_huggingface, read_manifest, resolve_checkpoint
from megalite.comm import Axis, Channel, ExpertAxes, ParallelMesh, TensorShard, World, open_channel
from megalite.config import Config, DeviceOptions, ParallelConfig, layout_problems
from megalite.convert import (
    BASE_META,
    ORIGIN_META,
    CheckpointSource,
    HuggingFaceSource,
    Origin,
    PeftSource,
    is_peft,
    stop_tokens,
)
from megalite.data import Tokenizer
from megalite.errors import CheckpointError, ConfigError
from megalite.generation import Generator, ModelParts, OnTokens, Request, Sampling
from megalite.inventory import placement_of, stage_layer_ranges
from megalite.models import build_stack, layer_specs
from megalite.nn import LayerStack, expert_biases
from megalite.parallel.expert import expert_axes
from megalite.parallel.tensor import LayerContext, hold_in_8_bits
from megalite.schedule import ScheduleShape, StagePlacement, forward_program, token_pairs
from megalite.stores import Place
from megalite.train import config_of, load_model, load_weights, make_mesh, parameter_dtype


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for use."""

    config: Config  # of the run that saved it, with its parallel section replaced by the layout of these ranks
    tokenizer: Tokenizer  # what the checkpoint carries
    mesh: ParallelMesh  # the ranks that hold it
    channel: Channel  # between pipeline ranks
    placement: StagePlacement
    parts: ModelParts  # the stages of this rank, in evaluation mode, without gradients
    path: Place  # the checkpoint it came from; of a Hugging Face folder the two numbers are 0
    iteration: int
    consumed_samples: int
    origin: Origin = field(default_factory=Origin)  # the Hugging Face model that it was first, if any

    @property
    def is_folder(self) -> bool:
        """Whether it is of a Hugging Face folder, not of a run."""
        return is_huggingface(self.path) or is_peft(self.path)

    @property
    def front(self) -> tuple[int, ...]:
        """Tokens in front of a text: of a Hugging Face folder its tokenizer's; a run is trained without."""
        return self.tokenizer.front if self.is_folder else ()

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end a text: the end of a document, and those of the model's generation_config.json."""
        return stop_tokens(self.origin, self.tokenizer)

    @property
    def model(self) -> LayerStack:
        """All layers, where one pipeline rank holds them."""
        assert self.parts.num_stages == 1, "the model's layers are on several ranks"
        return self.parts.stages[0]

    @property
    def device(self) -> torch.device:
        return self.parts.device

    @property
    def generator(self) -> Generator:
        """Continues texts. All ranks use it together."""
        together = self.mesh.size("ep") > 1  # replicas hold each other's experts: all run their layers at the same time
        return Generator(
            self.parts,
            self.mesh.coordinate("pp"),
            self.placement,
            self.channel,
            self.mesh.over("dp", "pp") if together else self.mesh["pp"],
            self.mesh["stream"],
            together,
            num_choices=self.tokenizer.vocab_size,
        )


def generate(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    micro_batch_size: int = 1,
    ended: Callable[[list[int]], bool] = lambda new: False,
    on_tokens: OnTokens = lambda request, tokens: None,
) -> list[list[list[int]]]:
    """The ids that follow each prompt: `[prompt][sample][ids]`, on every rank. Collective: all ranks give the same.

    prompts: of at least one id each; of one longer than the model's positions only the end is seen. When a text has
        become longer, it continues from the newer half of what fits.
    max_new_tokens: a sample ends then, or before one of `loaded.stops`.
    num_samples: of each prompt; sample j is drawn with the seed + j.
    micro_batch_size: sequences that go through the model together.
    ended: whether a continuation is complete; asked now and then, so it may have become a little longer.
    on_tokens: told of new ids as they come, on the ranks of the replica that generates them.
    Which ids follow depends on the weights, the prompt and its number, the seed, and nothing else (in fp64; in a
    narrower precision two logits may be so close that layouts round them to different orders).
    Raises CheckpointError where the model's logits are not numbers.
    """
    assert all(prompts), "a model continues a text, so there is at least one token"
    requests = [
        Request(number, tuple(prompt), sample) for number, prompt in enumerate(prompts) for sample in range(num_samples)
    ]
    found = loaded.generator.run(
        requests,
        sampling,
        max_new_tokens=max_new_tokens,
        stops=loaded.stops,
        micro_batch_size=micro_batch_size,
        ended=ended,
        on_tokens=on_tokens,
    )
    new = [ids for ids in found if ids is not None]
    if len(new) < len(found):
        raise CheckpointError("`load`: the model's logits are not numbers (its training diverged?); load an older one")
    return [new[first : first + num_samples] for first in range(0, len(new), num_samples)]


def load_for_inference(
    directory: Path | str,
    *,
    ckpt_step: int | None = None,
    use_ema: bool = False,
    base: Path | str | None = None,
    device: torch.device | str = "auto",
    dtype: torch.dtype | None = None,
    world: World | None = None,
    parallel: ParallelConfig | None = None,
    changed: Callable[[Config], Config] | None = None,
) -> LoadedModel:
    """Load a model onto the ranks of `world`, or into this process. Collective.

    directory: a run directory (its newest committed checkpoint counts, or `ckpt_step`), one checkpoint, or a Hugging
        Face folder of a family that we have, or adapters of peft (with `base`).
    use_ema: the average of its weights (`--ema-decay`) in place of the weights.
    base: of adapters, where the model that they were trained beside lies now; None: where it did then.
    device: `auto` is cuda where torch sees a GPU.
    dtype: of the weights; None: that of the training on a GPU, fp32 on a CPU (fp64 stays fp64).
    parallel: sizes of the tensor-, pipeline-, context- and expert-parallel axes; the rest of the world are replicas.
    changed: makes of the configuration that was found the one to measure by; the weights are the same.
    Raises CheckpointError where nothing is there, or it is damaged; DataError where its tokenizer cannot be built (a
    package it needs is missing, for example); ConfigError where the model cannot be laid out so.
    """
    found = _open(directory, ckpt_step, use_ema, None if base is None else Path(base))
    config = found.config if changed is None else changed(found.config)
    target = pick_device(str(device))
    world = world or World()
    model_config = dataclasses.replace(config.model, make_vocab_size_divisible_by=1)  # inference needs no padding
    parallel = dataclasses.replace(parallel or ParallelConfig(), hardware=DeviceOptions(device=target.type))
    config = dataclasses.replace(config, model=model_config, parallel=parallel)
    if problems := layout_problems(config, world.size):
        raise ConfigError(problems)
    mesh = make_mesh(config.parallel, dataclasses.replace(world, device=target))
    placement = ScheduleShape(parallel.pipeline_model_parallel_size, 1, workers=parallel.workers).placement
    channel = open_channel(mesh, token_pairs(placement), split=False)
    if dtype is None:  # half precision would be slow on a CPU, and no smaller
        dtype = torch.float32 if target.type == "cpu" and config.training.precision.half else parameter_dtype(config)
    parts = _empty_parts(config, mesh, placement, target, dtype)
    shards = [shard for stack in parts.stages.values() for shard in _shards(stack)]
    found.load(shards, mesh.world)
    if config.model.lora.frozen_weights_int8:
        hold_in_8_bits(parts.stages.values())
    engine = config, found.tokenizer, mesh, channel, placement, parts
    loaded = LoadedModel(*engine, found.path, *found.progress, found.origin)
    _ = loaded.generator  # makes its communicators
    mesh.complete()
    return loaded


@dataclass(frozen=True)
class _Found:
    """What is at a path. load: fills shards with its weights, on all ranks. progress: iteration, samples consumed."""

    path: Place
    config: Config
    tokenizer: Tokenizer
    origin: Origin
    progress: tuple[int, int]
    load: Callable[[Sequence[TensorShard], Axis], None]


def _open(directory: Path | str, ckpt_step: int | None, use_ema: bool, base: Path | None) -> _Found:
    """Raises MegaliteError."""
    peft = is_peft(directory)
    if peft or is_huggingface(directory):
        if base is not None and not peft:
            raise ConfigError(f"`base`={base}: {directory} is a Hugging Face model, which needs no other; drop it")
        if use_ema:
            raise ConfigError(f"`use_ema`: {directory} is a Hugging Face model and has one set of weights; drop it")
        if ckpt_step is not None:
            raise ConfigError(f"`ckpt_step`={ckpt_step}: {directory} is a Hugging Face model and has no steps; drop it")
        source = PeftSource(directory, base) if peft else HuggingFaceSource(directory)
        load = partial(load_weights, source.read, source.directory)
        return _Found(Path(directory), source.config, source.tokenizer, source.origin, (0, 0), load)
    advice = "give a run's `save`, one of its checkpoints, or a Hugging Face model"
    path = resolve_checkpoint(directory, ckpt_step, advice=advice)
    manifest = read_manifest(path)
    config = config_of(path, manifest)
    reader = CheckpointReader(path, use_ema=use_ema)
    if base is not None and BASE_META not in manifest.meta:
        raise ConfigError(f"`base`={base}: {path} holds a whole model; drop it")
    if config.model.is_foreign:
        raise CheckpointError(
            f"{path}: holds a `model_module` ({config.model.module.model_module}); evaluate it by "
            "pretrain_gpt.py --skip-train --load, or give the module its weights (megalite.read_weights)"
        )
    meta = Meta(manifest.meta, str(path))
    progress = meta.integer("iteration", 0), meta.integer("consumed_samples", 0)
    origin = Origin.from_meta(manifest.meta.get(ORIGIN_META))
    tokenizer = CheckpointSource.tokenizer_of(reader)
    return _Found(path, config, tokenizer, origin, progress, partial(load_model, path, use_ema, base))


def pick_device(name: str) -> torch.device:
    """Turn `--device` into a device. Raises ConfigError where cuda is asked for and torch sees no GPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"`device`={name}: torch sees no GPU (torch {torch.__version__}); use `device`=cpu")
    return torch.device(name)


def _empty_parts(
    config: Config, mesh: ParallelMesh, placement: StagePlacement, device: torch.device, dtype: torch.dtype
) -> ModelParts:
    cp = mesh.context(gathers=config.parallel.context.cp_comm_type == "all_gather")
    context = LayerContext(
        tp=mesh["tp"],
        sharers=mesh.sharing_keys(config.model.query_groups),
        cp=cp,
        experts=expert_axes(mesh) if config.model.experts.num_experts is not None else ExpertAxes(),
        dtype=dtype,
        device=device,
    )
    specs = layer_specs(config.model)
    cuts = stage_layer_ranges(config, forward_program(placement, 1))
    stages = {}
    for stage, _ in placement.stages_of(mesh.coordinate("pp")):
        stages[stage] = build_stack(config.model, [specs[i] for i in cuts[stage]], context).eval()
        stages[stage].requires_grad_(False)
        for parameter in stages[stage].parameters():
            parameter.zero_()  # padding rows are in no checkpoint
    boundary = context.wide_dtype if config.model.fp32_residual_connection else dtype
    return ModelParts(stages, placement.num_stages, config.model, cp, boundary, device)


def _shards(model: LayerStack) -> list[TensorShard]:
    """All parameters as the rectangles that they are of their logical tensors: everything but padding; and biases of
    experts."""
    shards = [TensorShard(name, tuple(bias.shape), (0,), bias) for name, _, bias in expert_biases(model)]
    for name, parameter in model.logical_parameters():
        place = placement_of(parameter)
        inside = tuple(slice(extent) for extent in place.valid_shape(tuple(parameter.shape)))
        shards.append(TensorShard(name, place.global_shape, place.offset, parameter.detach()[inside]))
    return shards
