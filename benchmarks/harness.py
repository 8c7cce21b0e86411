"""What the benchmarks share: the command line, the record of a run, ratios, and the comparison with the baseline.

The record (`--json`) holds the machine, the versions, the settings and every repetition:

    {"benchmark", "date", "command", "machine": {...}, "versions": {...}, "settings": {...},
     "cases": [{"name", "unit", "base", "variants": {NAME: {"seconds": [...], "median", "lowest", "highest", "rate"}},
                "ratios": {"OURS / PEER": {"median", "lowest", "highest", "of_lowest"}}, "errors": {NAME: TEXT}}]}

A ratio is the peer's time (or memory) over ours, paired round by round: above 1 ours is better. `baseline.json` holds
such medians of `--quick` runs, with the tolerance of each. A row is worse where both the median and the ratio of the
fastest repetitions, which a busy machine disturbs least, are below baseline * (1 - tolerance).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

from benchmarks.turns import MIB, Build, Case, Samples, measure, progress
from command_line import ToolParser, run_tool
from disturbance import BusyClock, Watch
from megalite.config import ModelConfig
from megalite.errors import ConfigError, RuntimeFailure
from megalite.extras import EXTRA_OF, install_command, optional_package

BASELINE = Path(__file__).with_name("baseline.json")
#: Least and most of a row of the baseline.
TOLERANCE = (0.15, 0.5)
PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "datasets")
Json = dict[str, Any]


#: Layers, hidden size, heads, tokens, vocabulary: GPTs with learned positions, LayerNorm, biases and tanh GELU.
SIZES = {
    "tiny": (4, 64, 2, 32, 256),
    "small": (6, 384, 6, 256, 8192),
    "medium": (8, 512, 8, 512, 8192),
    "stages": (8, 384, 6, 256, 1024),  # a small head: two halves cost the same
    "gpt2": (12, 768, 12, 1024, 50304),
    "1b": (24, 2048, 16, 2048, 50304),
    "2b": (30, 2304, 18, 2048, 50304),
    "8b-layers": (8, 4096, 32, 2048, 50304),  # of the width of an 8B model
}
MODELS = tuple(SIZES)


def model_named(name: str) -> ModelConfig:
    """An untied model of SIZES."""
    layers, hidden, heads, seq_length, vocabulary = SIZES[name]
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=seq_length,
        vocab_size=vocabulary,
        activation="gelu-tanh",
        untie_embeddings_and_output_weights=True,
    )


@dataclass(frozen=True)
class Flag:
    """A setting of a benchmark; `quick` is its default under --quick. A list takes several words."""

    help: str
    full: Any
    quick: Any
    choices: Sequence[str] | None = None


@dataclass(frozen=True)
class Benchmark:
    """One script. cases: what its settings ask for. packages: variant -> the optional package that it needs."""

    name: str
    description: str
    flags: Mapping[str, Flag]
    cases: Callable[[argparse.Namespace], list[Case]]
    build: Build
    variants: tuple[str, ...]
    packages: Mapping[str, str] = field(default_factory=dict)

    def main(self) -> int:
        """Runs the script; the exit status."""
        return run_tool(self.run)

    def run(self, argv: list[str]) -> None:
        """Measures, prints, writes and compares. Raises MegaliteError."""
        args = self.parse(argv)
        cases = self.chosen_cases(args)
        if args.check:
            baseline_rows(self.name, cases)  # refuses before it measures
        record = self.record(argv, args)
        kept = {case["name"]: case for case in resumed(Path(args.json), record)} if args.resume else {}
        for case in cases:
            if case.name in kept:
                record["cases"].append(kept[case.name])
                continue
            record["cases"].append(self.measured(case, args, record))
            if sys.stderr.isatty():
                progress("")
            print(case_text(record["cases"][-1]), flush=True)
            if args.json:
                write_json(Path(args.json), record)
        if args.write_baseline:
            write_baseline(self.name, record)
        failed = [name for case in record["cases"] for name in case["errors"] if is_ours(name)]
        problems = [f"{self.name}: {name} did not run" for name in failed]
        problems += compare(self.name, record) if args.check else []
        if problems:
            raise RuntimeFailure("\n".join(problems))

    def measured(self, case: Case, args: argparse.Namespace, record: Json) -> Json:
        """What the record says of a case; what there is so far is written at once, as a machine may be lent."""

        def keep(samples: Samples) -> None:
            if args.json:
                unfinished = {**case_record(case, samples), "errors": {case.name: "did not end"}}
                write_json(Path(args.json), {**record, "cases": [*record["cases"], unfinished]})

        began, rounds = time.time(), _rounds(args, case)
        with Watch() as watch:
            samples = measure(case, self.build, rounds=rounds, timeout=args.timeout, tell=progress, keep=keep)
        busy = watch.others(began, time.time())
        return {**case_record(case, samples), "cores_used_by_others": round(busy, 2)}

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Raises ConfigError."""
        parser = ToolParser(self.description)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        for name, flag in self.flags.items():
            shown = [" ".join(map(str, v)) if isinstance(v, list) else str(v) for v in (flag.full, flag.quick)]
            first = flag.full[0] if isinstance(flag.full, list) else flag.full
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                type=type(first),
                nargs="+" if isinstance(flag.full, list) else None,
                choices=flag.choices,
                help=f"{flag.help} (default: {shown[0]}; with --quick: {shown[1]})",
            )
        parser.add_argument("--variants", nargs="+", choices=self.variants, help="measure these only (default: all)")
        parser.add_argument("--rounds", type=int, help="repetitions of each variant (default: 7; with --quick: 5)")
        parser.add_argument("--quick", action="store_true", help="small sizes: about 2 minutes at most on two cores")
        parser.add_argument("--check", action="store_true", help="as --quick; exit 1 where worse than baseline.json")
        parser.add_argument(
            "--write-baseline", action="store_true", help="as --quick; keep its ratios in baseline.json"
        )
        parser.add_argument("--json", metavar="OUT", help="write the record of this run to a file")
        parser.add_argument("--resume", action="store_true", help="continue the record in --json: cases in it are kept")
        parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one launch (default: 600)")
        args = parser.parse_args(argv)
        args.quick = args.quick or args.check or args.write_baseline
        for name, flag in self.flags.items():
            if getattr(args, name) is None:
                setattr(args, name, flag.quick if args.quick else flag.full)
        if args.resume and not args.json:
            raise ConfigError("--resume: needs the record of the run that was cut off; give --json FILE")
        if args.rounds is not None and args.rounds < 1:
            raise ConfigError(f"--rounds={args.rounds}: must be at least 1")
        return args

    def chosen_cases(self, args: argparse.Namespace) -> list[Case]:
        """The cases with the variants that are wanted and can run; one line for each package that is missing."""
        wanted = args.variants or self.variants
        for variant in args.variants or []:
            if variant in self.packages:
                optional_package(f"--variants={variant}", self.packages[variant])
        missing = {name: package for name, package in self.packages.items() if not importlib.util.find_spec(package)}
        for package in sorted(set(missing.values())):
            command = install_command(EXTRA_OF[package])
            print(f"{package} is not installed, its variants are left out; {command}", file=sys.stderr)
        there = {name for name in wanted if name not in missing}
        chosen = [
            _only(case, tuple(name for name in case.variants if kind_of(name) in there)) for case in self.cases(args)
        ]
        return [case for case in chosen if case.variants]

    def record(self, argv: list[str], args: argparse.Namespace) -> Json:
        """Everything but the cases."""
        return {
            "benchmark": self.name,
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join(["python", f"benchmarks/{self.name}.py", *argv]),
            "machine": machine(),
            "versions": versions(),
            "settings": {name: getattr(args, name) for name in (*self.flags, "quick", "rounds", "variants")},
            "cases": [],
        }


def kind_of(variant: str) -> str:
    """The name on the command line: what stands before a comma is one kind in several forms."""
    return variant.partition(",")[0]


def is_ours(variant: str) -> bool:
    return variant.startswith("megalite")


def _only(case: Case, variants: tuple[str, ...]) -> Case:
    pairs = tuple(pair for pair in case.pairs if set(pair) <= set(variants))
    return replace(case, variants=variants, pairs=pairs, base=case.base if case.base in variants else "")


def _rounds(args: argparse.Namespace, case: Case) -> int:
    if case.memory:
        return 1 if args.quick else 2
    return int(args.rounds or (5 if args.quick else 7))


def resumed(path: Path, record: Json) -> list[Json]:
    """The cases of a record that were measured with the same settings on the same machine; none if there is no such
    file. Raises ConfigError for another record."""
    if not path.exists():
        return []
    before: Json = json.loads(path.read_text(encoding="utf-8"))
    for name in ("benchmark", "machine", "versions", "settings"):
        if before.get(name) != json.loads(json.dumps(record[name])):
            raise ConfigError(
                f"--resume: {path} is of another {name.rstrip('s')}; give another --json, or drop --resume"
            )
    found: list[Json] = [case for case in before["cases"] if not case["errors"]]
    return found


def case_record(case: Case, samples: Samples) -> Json:
    """What the record says of a case."""
    variants: Json = {}
    for name, seconds in samples.seconds.items():
        variants[name] = {"seconds": [float(f"{value:.6g}") for value in seconds], **spread(seconds)}
        if case.work:
            variants[name]["rate"] = case.work / statistics.median(seconds)
        if name in samples.device_bytes:
            variants[name]["device_mib"] = round(samples.device_bytes[name] / MIB, 1)
        if name in samples.launches:
            variants[name]["launches"] = samples.launches[name]
        if case.flops and (peak := _peak_flops()):
            variants[name]["mfu"] = round(case.flops / case.ranks / peak / statistics.median(seconds), 4)
    for name, taken in samples.process_bytes.items():
        mib = [value / MIB for value in taken]
        variants[name] = {"process_mib": [round(value, 1) for value in mib], **spread(mib)}
        if name in samples.live_bytes:
            variants[name]["live_mib"] = round(statistics.median(samples.live_bytes[name]) / MIB, 1)
    values = samples.seconds or {name: list(map(float, taken)) for name, taken in samples.process_bytes.items()}
    pairs = [*case.pairs, *((name, case.base) for name in values if case.base and name != case.base)]
    ratios = {
        f"{ours} / {peer}": {
            **spread([b / a for a, b in zip(values[ours], values[peer], strict=True)]),
            "of_lowest": round(min(values[peer]) / min(values[ours]), 4),
        }
        for ours, peer in pairs
        if ours in values and peer in values
    }
    unit = "MiB" if case.memory else f"{case.unit}/s" if case.unit else "ms"
    return {
        "name": case.name, "unit": unit, "base": case.base, "pairs": [list(pair) for pair in case.pairs],
        "variants": variants, "ratios": ratios, "errors": samples.errors,
    }  # fmt: skip


def _peak_flops() -> float | None:
    """Of this machine's GPU in bf16."""
    import torch

    from megalite.planner import peak_flops

    return peak_flops(torch.cuda.get_device_name(0), "bf16") if torch.cuda.is_available() else None


def spread(values: Sequence[float]) -> Json:
    """Median, lowest and highest, to six digits."""
    found = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: float(f"{value:.6g}") for name, value in found.items()}


def case_text(case: Json) -> str:
    """For people: a line for each variant, then one for each ratio."""
    lines = [case["name"]]
    scale, unit = (1.0, "MiB") if case["unit"] == "MiB" else (1e3, "ms")
    for name, found in case["variants"].items():
        low, typical, high = (scale * found[key] for key in ("lowest", "median", "highest"))
        rate = f"{found['rate']:14,.6g} {case['unit']}" if "rate" in found else ""
        rate += f"   live {found['live_mib']:.0f} MiB" if "live_mib" in found else ""
        rate += f"   {found['device_mib']:,.0f} MiB" if "device_mib" in found else ""
        rate += f"   {found['launches']:,} launches" if "launches" in found else ""
        rate += f"   MFU {found['mfu']:.1%}" if "mfu" in found else ""
        lines.append(f"  {name:36s} {typical:10.2f} {unit} [{low:.2f} .. {high:.2f}]{rate}")
    for name, ratio in case["ratios"].items():
        lines.append(f"  ratio {name:50s} {ratio['median']:.3f} [{ratio['lowest']:.3f} .. {ratio['highest']:.3f}]")
    if (busy := case["cores_used_by_others"]) > BusyClock.QUIET:
        lines.append(f"  disturbed: others used {busy:.1f} cores meanwhile")
    lines += [f"  {name}: left out, {error}" for name, error in case["errors"].items()]
    return "\n".join(lines)


def machine() -> Json:
    """Processor, cores, memory, GPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        cpu = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory), "gpus": gpus, "system": platform.system()}


def versions() -> Json:
    """Of Python and of the packages that are measured."""
    from megalite import __version__

    found = {"python": platform.python_version(), "megalite": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def write_json(path: Path, value: Json) -> None:
    """Readable, but with a list of numbers on one line."""
    text = re.sub(r"\[[-\d.e,\s]+\]", lambda found: " ".join(found[0].split()), json.dumps(value, indent=1))
    path.write_text(text.replace("[ ", "[").replace(" ]", "]") + "\n", encoding="utf-8")


def read_baseline() -> Json:
    found: Json = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
    return found


def baseline_rows(name: str, cases: Sequence[Case]) -> Json:
    """The rows of a benchmark. Raises ConfigError where there is none for what is going to be measured."""
    rows: Json = read_baseline().get(name, {}).get("rows", {})
    asked = {f"{case.name}: {ours} / {peer}" for case in cases for ours, peer in case.pairs}
    unknown = sorted(asked - rows.keys())
    if unknown or not asked:
        what = unknown[0] if unknown else "what these variants leave"
        raise ConfigError(
            f"--check: {BASELINE.name} has no row for {what}; leave the other settings at those of --quick, or write "
            "rows of your own with --write-baseline"
        )
    return rows


def compare(name: str, record: Json) -> list[str]:
    """A line for each row that is worse than the baseline allows."""
    rows, worse, measured = read_baseline()[name]["rows"], [], measured_rows(record)
    for key, ratio in measured.items():
        row = rows[key]
        if max(ratio["median"], ratio["of_lowest"]) < row["ratio"] * (1 - row["tolerance"]):
            allowed = f"{row['ratio']:.3f} less {row['tolerance']:.0%}"
            found = f"{ratio['median']:.3f} (of the fastest repetitions {ratio['of_lowest']:.3f})"
            worse.append(f"{name}: {key}: {found}, worse than {allowed}")
    if not worse:
        print(f"{name}: {len(measured)} ratios, none worse than {BASELINE.name} allows")
    return worse


def measured_rows(record: Json) -> Json:
    """`CASE: OURS / PEER` -> its ratio: median and that of the fastest repetitions."""
    return {
        f"{case['name']}: {ours} / {peer}": case["ratios"][f"{ours} / {peer}"]
        for case in record["cases"]
        for ours, peer in case["pairs"]
        if f"{ours} / {peer}" in case["ratios"]
    }


def write_baseline(name: str, record: Json) -> None:
    """Puts the ratios of this run into the baseline; tolerance: three quarters of how far its rounds were apart."""
    baseline, rows = read_baseline(), {}
    for key, ratio in measured_rows(record).items():
        apart = (ratio["highest"] - ratio["lowest"]) / ratio["median"]
        tolerance = min(max(TOLERANCE[0], round(0.75 * apart, 2)), TOLERANCE[1])
        rows[key] = {"ratio": round(ratio["median"], 3), "tolerance": tolerance}
    baseline[name] = {key: record[key] for key in ("date", "command", "machine", "versions")} | {"rows": rows}
    write_json(BASELINE, baseline)
