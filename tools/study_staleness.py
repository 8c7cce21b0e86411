"""What delayed gradients cost each optimizer, and what each `--staleness-correction` gives back.

    python tools/study_staleness.py run --data input.txt --results study.jsonl      trains what is missing, one by one
    python tools/study_staleness.py run ... --runs 'lion: flush' --lr 1e-4 2e-4     the rates from which one is chosen
    python tools/study_staleness.py table --results study.jsonl                     mean over the seeds, as markdown
    python tools/study_staleness.py plot --results study.jsonl --output gap.svg     the same as a picture (matplotlib)

A run is `configs/shakespeare_char.yaml` (0.8 million parameters, 2,000 iterations of 12 x 64 characters) or, with
`--recipe quickstart`, `configs/quickstart.yaml`, in one process: 2BW's update is the same at every number of stages,
one included. `--recipe short` is 200 iterations of 8 x 64 characters of four layers of width 64, `deep` of eight, so
that there may be eight stages. A JSON line a run is appended to the results when it ends; a run that has its line is
not run again.

    flush            synchronous                     flush ahead N    synchronous, on weights N steps ahead
    2bw              delay 1, nothing done           2bw METHOD [N..] delay 1 with a correction [N steps ahead]
    pipedream ...    the same on four stages of one machine (`--nprocs 4`), delay 3, 2, 1, 0; an update of 3 samples
    pipedream8 ...   on eight, which takes `--recipe deep`
    2bw ... after N  the first N iterations without delay (`--pipeline-flush-steps`)

A variant may end in `@ 0.87`: so much shorter, with its learning-rate decay, for a comparison at equal time. The
learning rate is that of `RECIPES`: the best, a factor of two apart, of one seed's synchronous runs.
Delayed runs take the same; PipeDream, whose updates are of fewer samples, wants lower ones too (`--lr`).
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import IO, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import ToolParser, run_tool
from megalite.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent

AHEAD = "--ahead"
"""First argument of the process that trains a synchronous run on extrapolated weights."""


@dataclass(frozen=True)
class Recipe:
    """config: the file. iterations: of a whole run. rates: of each optimizer, for the synchronous run, the best of
    those a factor of two apart. flags: beside the file. samples, batch: of a PipeDream's update, of an iteration."""

    config: str
    iterations: int
    rates: dict[str, float]
    flags: str = ""
    samples: int = 3
    batch: int = 12


SMALL = "--hidden-size 64 --num-attention-heads 2 --lr-warmup iters=20 --micro-batch-size 8 --split 97,3,0"
RECIPES = {
    "character": Recipe(
        "configs/shakespeare_char.yaml",
        2000,
        {"adam": 4e-3, "muon": 8e-3, "lion": 8e-4, "sgd": 2e-1, "adafactor": 4e-3, "soap": 8e-3, "shampoo": 4e-3},
    ),
    "quickstart": Recipe(
        "configs/quickstart.yaml",
        330,
        {"adam": 7.5e-4, "muon": 1e-2, "lion": 3e-4, "sgd": 1e-1, "adafactor": 7.5e-4, "soap": 6e-3, "shampoo": 6e-3},
    ),
    "short": Recipe(
        "configs/shakespeare_char.yaml",
        200,
        {"adam": 8e-3, "muon": 16e-3, "soap": 8e-3, "shampoo": 8e-3, "kfac": 16e-3},
        f"--num-layers 4 {SMALL}",
        samples=2,
        batch=8,
    ),
    "deep": Recipe(
        "configs/shakespeare_char.yaml",
        200,
        {"adam": 8e-3, "muon": 16e-3},
        f"--num-layers 8 {SMALL}",
        samples=1,
        batch=8,
    ),
}
FIRST = ("adam: 2bw predict 2", "adam: flush", "adam: 2bw", "muon: flush", "muon: 2bw", "muon: 2bw predict 1 2")
SECOND = (
    "adam: 2bw predict 1", "adam: 2bw nesterov", "adam: 2bw error-feedback", "adam: flush ahead 2",
    "muon: 2bw predict 1", "muon: 2bw predict 2", "muon: 2bw error-feedback", "muon: flush ahead 1",
)  # fmt: skip
REST = tuple(
    f"{name}: {variant}"
    for name in ("lion", "adafactor", "sgd", "soap", "shampoo")
    for variant in ("flush", "2bw", "2bw predict 1", "2bw predict 2", "2bw error-feedback", "flush ahead 1")
)
SEEDS = (1337, 1, 2)
NUMBER = r"\d+(\.\d+)?"
METHOD = rf" (none|error-feedback|nesterov|predict( {NUMBER}){{0,2}})"
VARIANTS = (
    "flush, flush ahead N, pipedream [METHOD [N [N]]] or 2bw [METHOD [N [N]]] [after N] (METHOD: none, error-feedback, "
    "nesterov, predict; N iterations flushed first), and at its end, for a shorter run, @ 0.80"
)
VARIANT = re.compile(rf"(flush( ahead {NUMBER})?|pipedream8?({METHOD})?|2bw({METHOD})?( after \d+)?)( @ 0?\.\d+)?")


@dataclass(frozen=True)
class Run:
    """One training. variant: as the module says, e.g. `2bw predict 2`. lr: the highest learning rate."""

    recipe: str
    optimizer: str
    variant: str
    seed: int
    lr: float

    @property
    def name(self) -> str:
        return f"{self.recipe} {self.optimizer}: {self.variant}, lr {self.lr:g}, seed {self.seed}"

    def flags(self) -> list[str]:
        """Of the command line; a run on weights ahead begins with `AHEAD`. Raises ConfigError."""
        recipe, (words, part) = RECIPES[self.recipe], self._words()
        iterations = round(recipe.iterations * part)
        flags = ["--config", str(ROOT / recipe.config), "--optimizer", self.optimizer, "--seed", str(self.seed)]
        flags += ["--lr", str(self.lr), "--train-iters", str(iterations), *recipe.flags.split()]
        if words[0] == "flush":
            if len(words) == 1:
                return flags
            ahead = ["--pipeline-schedule", "2bw", "--pipeline-flush-steps", str(iterations)]
            return [AHEAD, *flags, *ahead, *_correction("predict", words[2])]
        flags += ["--pipeline-flush-steps", words.pop() if "after" in words else "0"]
        words = [word for word in words if word != "after"]
        schedule, stages = words[0].rstrip("8"), "8" if words[0].endswith("8") else "4"
        flags += ["--pipeline-schedule", schedule, *_correction(*(words[1:] or ["none"]))]
        if schedule == "pipedream":
            flags += ["--nprocs", stages, "--pipeline-model-parallel-size", stages, "--clip-grad", "0"]
            flags += ["--micro-batch-size", str(recipe.samples), "--global-batch-size", str(recipe.batch)]
            flags += ["--untie-embeddings-and-output-weights"]
        return flags

    def _words(self) -> tuple[list[str], float]:
        if not VARIANT.fullmatch(self.variant):
            raise ConfigError(f"--runs='{self.optimizer}: {self.variant}': no such variant; give {VARIANTS}")
        variant, _, part = self.variant.partition(" @ ")
        return variant.split(), float(part or 1)


def _correction(method: str, *ahead: str) -> list[str]:
    return ["--staleness-correction", method, *(["--staleness-lookahead", *ahead] if ahead else [])]


def train_ahead(argv: list[str]) -> int:
    """A synchronous training whose weights are extrapolated all the same: no option of the product."""
    from megalite.optim import Delay

    main = runpy.run_path(str(ROOT / "pretrain_gpt.py"))["main"]
    with patch.object(Delay, "at", lambda self, iteration: self.updates):
        return int(main(argv))


def train(run: Run, data: Path | None, cache: Path) -> dict[str, Any]:
    """Trains; returns the line of the results."""
    flags = run.flags()
    entry = ROOT / ("tools/study_staleness.py" if flags[0] == AHEAD else "pretrain_gpt.py")
    with tempfile.TemporaryDirectory(prefix="study-") as folder:
        command = [sys.executable, str(entry), *flags, "--save", folder, "--device", "cpu"]
        command += ["--data-cache-path", str(cache)] + (["--data-path", str(data)] if data else [])
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip()[-3000:].removeprefix("error: ").replace("\nerror: ", "\n")
            raise ConfigError(f"{run.name}: {' '.join(command)}\n{last}")
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    losses = [[line["iteration"], line["lm_loss"]] for line in lines if line["kind"] == "train"]
    [final] = [line for line in lines if line["kind"] == "valid"]
    return {**vars(run), "valid_loss": final["lm_loss"], "iterations": final["iteration"], "train_loss": losses}


def read(path: Path) -> list[dict[str, Any]]:
    """What has been measured; of a study that was killed the last line may be a part of one. Raises ConfigError."""
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--results={path}: cannot be read ({error}); give what `run` has written") from None
    found = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not _is_json(line):
            break
        try:
            found.append(json.loads(line))
            summary(found[-1:])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"--results={path}: line {number} is no result; delete the line") from None
    return found


def _end_last_line(file: IO[bytes]) -> None:
    file.seek(0)
    whole, newline, last = file.read().rpartition(b"\n")
    if not _is_json(last):
        file.truncate(len(whole) + len(newline))
    else:
        file.write(b"\n")


def _is_json(line: str | bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def wanted(recipe: str, names: Sequence[str], seeds: Sequence[int], rates: Sequence[float] | None) -> Iterator[Run]:
    """rates: None for that of the recipe. Raises ConfigError."""
    known = RECIPES[recipe].rates
    for seed in seeds:
        for name in names:
            optimizer, _, variant = name.partition(": ")
            optimizer = {"adamw": "adam", "k-fac": "kfac"}.get(optimizer.lower(), optimizer.lower())
            if optimizer not in known:
                raise ConfigError(f"--runs='{name}': give 'OPTIMIZER: VARIANT' with one of {', '.join(known)}")
            for lr in rates or (known[optimizer],):
                yield Run(recipe, optimizer, variant, seed, lr)


def run_all(args: argparse.Namespace) -> None:
    runs = [*wanted(args.recipe, args.runs, args.seeds, args.lr)]
    for run in runs:
        run.flags()  # whatever is wrong with one of them is said before hours of training
    try:
        results = args.results.open("a+b")
    except OSError as error:
        raise ConfigError(
            f"--results={args.results}: cannot be written ({error.strerror}); give another file"
        ) from None
    with results:
        _end_last_line(results)
        for run in runs:
            if any(vars(run).items() <= line.items() for line in read(args.results)):
                continue
            line = train(run, args.data, args.cache)
            results.write(json.dumps(line).encode() + b"\n")
            results.flush()
            print(f"{run.name}: {line['valid_loss']:.4f}", flush=True)


Key = tuple[str, str, float, str]
"""Recipe, optimizer, learning rate, variant."""


def summary(lines: Sequence[dict[str, Any]]) -> dict[Key, dict[int, float]]:
    """Validation loss by seed."""
    found: dict[Key, dict[int, float]] = defaultdict(dict)
    for line in lines:
        found[line["recipe"], line["optimizer"], line["lr"], line["variant"]][line["seed"]] = line["valid_loss"]
    return dict(found)


def gap(found: dict[Key, dict[int, float]], key: Key) -> float | None:
    """Above the synchronous runs of the same optimizer and rate, over the seeds that both have."""
    flush = found.get((*key[:3], "flush"), {})
    both = sorted(flush.keys() & found[key].keys())
    return mean(found[key][seed] - flush[seed] for seed in both) if both else None


def table(args: argparse.Namespace) -> None:
    found = summary(read(args.results))
    seeds = sorted({seed for values in found.values() for seed in values}, key=lambda s: (s not in SEEDS, s))
    print("| recipe | optimizer | lr | variant | " + " | ".join(f"seed {s}" for s in seeds) + " | mean | above flush |")
    print("|---|---|---|---|" + "---|" * (len(seeds) + 2))
    for key, values in sorted(found.items()):
        above = gap(found, key)
        cells = [f"{values[s]:.4f}" if s in values else "" for s in seeds]
        cells += [f"{mean(values.values()):.4f}", "" if above is None else f"{above:+.4f}"]
        recipe, optimizer, lr, variant = key
        print(f"| {recipe} | {optimizer} | {lr:g} | {variant} | {' | '.join(cells)} |")


def plot(args: argparse.Namespace) -> None:
    from megalite.extras import optional_package

    pyplot = optional_package("plot", "matplotlib.pyplot")
    pyplot.rcParams["svg.hashsalt"] = "staleness"
    found = summary(read(args.results))
    shown = [(key, gap(found, key)) for key in sorted(found) if key[3] != "flush" and "@" not in key[3]]
    shown = [(key, above) for key, above in shown if above is not None]
    figure, axes = pyplot.subplots(figsize=(8, 0.32 * len(shown) + 1.2))
    colours = {"adam": "#1f77b4", "muon": "#d62728"}
    names = [
        f"{key[1]} at {key[2]:g}: {key[3]}" + ("" if key[0] == "character" else f" ({key[0]})") for key, _ in shown
    ]
    axes.barh(names, [above for _, above in shown], color=[colours.get(key[1], "#7f7f7f") for key, _ in shown])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("validation loss above that of synchronous runs")
    axes.margins(y=0.01)
    axes.set_xscale("symlog", linthresh=0.02)  # what nothing is done about may be fifty times the rest
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(args.output, metadata={"Date": None})


def main(argv: list[str]) -> int:
    if argv[:1] == [AHEAD]:
        return train_ahead(argv[1:])
    parser = ToolParser("What delayed gradients cost each optimizer: see docs/asynchronous.md.")
    commands = parser.add_subparsers(required=True, metavar="{run,table,plot}", parser_class=ToolParser)
    for name, action in (("run", run_all), ("table", table), ("plot", plot)):
        command = commands.add_parser(name)
        command.set_defaults(action=action)
        command.add_argument(
            "--results",
            type=Path,
            default=Path("study_staleness.jsonl"),
            help="a line for each run; runs in it are kept",
        )
        if name == "plot":
            command.add_argument("--output", type=Path, required=True)
        if name == "run":
            command.add_argument("--data", type=Path, help="a text; without it that of the quickstart")
            cache = Path(tempfile.gettempdir()) / "study-staleness"
            command.add_argument("--cache", type=Path, default=cache, help="folder of the tokenised text")
            command.add_argument("--recipe", choices=tuple(RECIPES), default="character", help="model, text and length")
            command.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="each run once with each")
            command.add_argument("--lr", type=float, nargs="+", help="learning rates other than the recipe's")
            command.add_argument(
                "--runs",
                nargs="+",
                default=(*FIRST, *SECOND, *REST),
                metavar="'OPTIMIZER: VARIANT'",
                help=f"{VARIANTS}: 'adam: 2bw predict after 40', 'muon: flush @ 0.92'",
            )
    args = parser.parse_args(argv)
    args.action(args)
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main))
