"""Flags of tools that load a model onto several ranks, and the start of these ranks: as pretrain_gpt.py does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from command_line import ToolParser, stored
from megalite.config import SECTIONS, Config, ParallelConfig, build_section, options_of, show, stage_sizes
from megalite.config import Option as ConfigOption
from megalite.errors import ConfigError
from megalite.launch import advise_threads, launch, read_environment

if TYPE_CHECKING:
    from megalite.comm import World
    from megalite.inference import LoadedModel

#: Flags of the parallel section that a model needs which is not trained.
LAYOUT = (
    "nprocs",
    "tensor_model_parallel_size",
    "stage_meshes",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "cp_comm_type",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "device",
    "distributed_backend",
    "distributed_timeout_minutes",
)

Body = Callable[[argparse.Namespace, "World"], None]
"""What every rank runs."""


@dataclass(frozen=True)
class ToolSettings:
    """What the launcher asks of a configuration; the flags, which must be the same on all ranks."""

    parallel: ParallelConfig
    flags: tuple[str, ...]


def add_layout_flags(parser: ToolParser) -> None:
    """The flags of the layout, with the words and bounds of the configuration."""
    group = parser.add_argument_group("ranks that hold the model; those beyond one copy of it are replicas")
    for option in _options():
        group.add_argument(
            option.flag,
            type=option.kind,
            nargs="+" if option.many else None,
            default=option.default,
            choices=option.choices,
            help=option.help,
        )


def add_model_flags(parser: ToolParser) -> None:
    """The flags of the model that is loaded."""
    parser.add_argument(
        "--load", required=True, metavar="DIR", type=stored, help="run, checkpoint, Hugging Face model, peft adapters"
    )
    parser.add_argument(
        "--base", metavar="DIR", help="of adapters: where the model that they were trained beside lies now"
    )
    parser.add_argument("--ckpt-step", type=int, help="iteration to load; unset: the newest")
    parser.add_argument("--use-ema", action="store_true", help="the average of the weights of a run with --ema-decay")


def loaded_model(
    flags: argparse.Namespace, world: World, changed: Callable[[Config], Config] | None = None
) -> LoadedModel:
    """The model that the flags name, on every rank. changed: as `load_for_inference` has it. Raises MegaliteError."""
    from megalite.inference import load_for_inference  # torch comes with it

    which = {"ckpt_step": flags.ckpt_step, "use_ema": flags.use_ema, "base": flags.base}
    return load_for_inference(
        flags.load, **which, device=str(world.device), world=world, parallel=flags.parallel, changed=changed
    )


def tell_front(loaded: LoadedModel, world: World) -> None:
    """The first rank says it where texts of a run go without the tokens that transformers puts in front."""
    left_out = loaded.tokenizer.front[len(loaded.front) :]
    if left_out and world.is_first:
        ids = ", ".join(map(str, left_out))
        line = (
            f"note: texts begin without the tokenizer's special tokens (id {ids}), as in the training of {loaded.path}"
        )
        print(line, file=sys.stderr, flush=True)


def run_on_ranks(body: Body, flags: argparse.Namespace) -> int:
    """Starts the ranks that the flags ask for, or is one of them; the exit status. Raises ConfigError."""
    place = read_environment()
    given = tuple(f"{name}={value}" for name, value in sorted(vars(flags).items()))
    flags.parallel = parallel = layout_of(flags)
    if place.rank == 0 and (advice := advise_threads(ToolSettings(parallel, ()), place)) is not None:
        print(advice, file=sys.stderr, flush=True)

    def rank(settings: ToolSettings, world: World) -> None:
        body(flags, world)
        sys.stdout.flush()

    return launch(ToolSettings(parallel, given), rank, place)


def layout_of(flags: argparse.Namespace) -> ParallelConfig:
    """The layout that the flags ask for. Raises ConfigError."""
    options = _options()
    values = {option.name: getattr(flags, option.name) for option in options}
    for option in options:
        value, least = values[option.name], option.facts.get("ge", option.facts.get("gt"))
        numbers = value if isinstance(value, list) else [value]
        if least is not None and any(number is not None and number < least for number in numbers):
            raise ConfigError(f"{option.flag}={show(value)}: must be at least {least}")
        values[option.name] = tuple(value) if isinstance(value, list) else value
    if (meshes := values["stage_meshes"]) is not None:
        sizes = stage_sizes(meshes)
        for name, size in values.items():
            if name.endswith("parallel_size") and size not in (None, 1):
                drop = f"drop --{name.replace('_', '-')}"
                raise ConfigError(f"--stage-meshes={meshes}: says the sizes of each stage; {drop}")
        values |= sizes
    parallel: ParallelConfig = build_section(ParallelConfig, values)
    if parallel.context.context_parallel_size == 1 and parallel.context.cp_comm_type != "p2p":
        kind = parallel.context.cp_comm_type
        raise ConfigError(f"--cp-comm-type={kind}: has no effect at --context-parallel-size=1; drop it")
    return parallel


def _options() -> list[ConfigOption]:
    found = {option.name: option for option in options_of("parallel", SECTIONS["parallel"])}
    return [found[name] for name in LAYOUT]
