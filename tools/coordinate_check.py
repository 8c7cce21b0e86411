"""Train a model for a few steps at several widths, and say how its activations grow with the width.

    python tools/coordinate_check.py <flags of pretrain_gpt.py> --widths 64,128,256 [--steps 4]

The flags describe one model; at another width it has proportionally more heads of the same size, a wider MLP and wider
experts. A row of the table is the mean of |x| behind a layer (of the logits at the end) after the steps, and its slope
over the width in log-log coordinates: near 0 or below it the learning rate of one width is good for the others. The
exit status is 1 where a slope is above 0.2. Under muP none is, without it most are (Yang et al., arXiv 2203.03466,
section 8 and appendix D).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import ToolParser, check_numbers, name_ignored, run_tool, say
from megalite.config import Config, ModelConfig, build_section, config_problems, flat, options_of, parse
from megalite.errors import ConfigError, flag_of

if TYPE_CHECKING:
    from megalite.comm import World

FLAT = 0.2
"""Slopes up to this are taken for none: widths are few, and steps."""
SCALED = (
    *("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)


def parser() -> argparse.ArgumentParser:
    """The tool's own flags; everything else is the training's."""
    p = ToolParser(__doc__ or "")
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--widths", required=True, metavar="H,...", help="values of --hidden-size, two or more")
    p.add_argument("--steps", type=int, default=4, metavar="N", help="updates before activations are measured")
    return p


def widened(base: Config, width: int) -> Config:
    """The training at another width. Raises ConfigError where a size would be no whole number, or no model."""
    values, hidden = flat(base.model), base.model.hidden_size
    model, options = dict(values), {option.name: option for option in options_of("model", ModelConfig)}
    if base.model.mup.use_mup and base.model.mup.mup_base_hidden_size is None:
        model["mup_base_hidden_size"] = hidden
    for name in SCALED:
        if values[name] is not None and values.get(options[name].facts.get("needs", ""), True):
            model[name], rest = divmod(values[name] * width, hidden)
            if rest or not model[name]:
                raise ConfigError(
                    f"--widths={width}: {flag_of(name)}={values[name]} would be {values[name] * width / hidden:g}; use "
                    f"multiples of --hidden-size={hidden}"
                )
    config = replace(base, model=build_section(ModelConfig, model))
    if problems := config_problems(config, 1):
        raise ConfigError([f"--widths={width}: {problem}" for problem in problems])
    return config


def activations(config: Config, world: World, steps: int) -> dict[str, float]:
    """Layer -> mean |x| behind it in the forward pass that follows `steps` updates, and the loss there."""
    from torch import Tensor

    from megalite.nn import Block, Embedding, Head
    from megalite.train import open_run

    found: dict[str, list[float]] = {}

    def note(name: str, x: Tensor) -> None:
        found.setdefault(name, []).append(float(x.detach().double().abs().mean()))

    with open_run(config, world) as run:
        for stage in run.state.model.stages.values():
            for name, module in stage.modules[0].named_modules():
                if isinstance(module, Head):
                    module.register_forward_pre_hook(lambda m, given: note("logits", m.logits(given[0])))
                elif isinstance(module, (Block, Embedding)):
                    module.register_forward_hook(lambda m, given, out, name=name: note(name, out))
        for step in range(steps + 1):
            found.clear()
            loss = run.trainer.train_step(drain=step == steps).lm_loss
        assert loss is not None
    return {name: sum(values) / len(values) for name, values in found.items()} | {"loss": float(loss)}


def slope(widths: Sequence[int], values: Sequence[float]) -> float:
    """Of log value over log width, by least squares."""
    logs = [math.log(max(value, 1e-300)) for value in values]
    return statistics.linear_regression([math.log(width) for width in widths], logs).slope


def table(widths: Sequence[int], measured: Sequence[Mapping[str, float]]) -> tuple[list[str], list[str]]:
    """(The lines of the table, the layers that grow with the width)."""
    lines, grown = ["".join(f"{title:>12}" for title in ("", *widths, "slope"))], []
    for name in measured[0]:
        values = [each[name] for each in measured]
        row = f"{name:>12}" + "".join(f"{value:>12.4g}" for value in values)
        if name == "loss":
            lines.append(row)
            continue
        rise = slope(widths, values)
        lines.append(f"{row}{rise:>12.2f}")
        grown += [name] if rise > FLAT else []
    return lines, grown


def main(argv: list[str]) -> int:
    """Runs the tool; the exit status."""
    return run_tool(_run, argv)


def _run(argv: list[str]) -> int:
    args, rest = parser().parse_known_args(argv)
    words = args.widths.split(",")
    if len(set(words)) < 2 or not all(word.isdecimal() and 0 < int(word) <= 1 << 20 for word in words):
        raise ConfigError(f"--widths={args.widths}: two or more widths and commas between them, such as 64,128,256")
    check_numbers(args, steps=(0, 10**6))
    widths = sorted({int(word) for word in words})
    base = parse(rest)
    name_ignored(rest)
    if base.model.is_foreign:
        name = base.model.module.model_module
        raise ConfigError(f"--model-module={name}: only models of megalite's own have widths that are known here")
    if base.parallel.nprocs not in (None, 1):
        raise ConfigError(f"--nprocs={base.parallel.nprocs}: the widths are trained by one process; drop it")
    length = base.training.length.train_iters
    if length is not None and length <= args.steps:
        raise ConfigError(f"--train-iters={length}: not above --steps={args.steps}; train longer")
    configs = [widened(base, width) for width in widths]
    measured: list[dict[str, float]] = []

    def body(config: Config, world: World) -> int:
        for each in configs:
            measured.append(activations(each, world, args.steps))
        lines, grown = table(widths, measured)
        say("\n".join(lines))
        if grown:
            say(f"grow with the width: {', '.join(grown)}")
        return int(bool(grown))

    from megalite.launch import launch

    return launch(base, body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
