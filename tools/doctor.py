"""Says what this machine has for megalite: versions, devices, optional packages, and whether local ranks can talk.

    python tools/doctor.py [--skip-collectives] [--stage-meshes 2x1,1x2] [--disk DIR]

Exit status 0: training can start here. 1: the local collective test failed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command_line import ToolParser, run_tool  # noqa: E402
from megalite.errors import ConfigError  # noqa: E402
from megalite.extras import EXTRA_OF, install_command  # noqa: E402

CORE = ("torch", "numpy", "pyyaml", "safetensors", "xxhash", "tokenizers")
PURPOSES = {
    "transformers": "tools/convert_checkpoint.py --verify",
    "jinja2": "conversations (tools/preprocess_data.py --data-format chat)",
    "peft": "adapters beside peft's own (tools/convert_checkpoint.py --verify)",
    "datasets": "preprocessing of anything that `datasets` loads",
    "pyarrow": "preprocessing of parquet files",
    "sentencepiece": "SentencePieceTokenizer",
    "zstandard": "preprocessing of .jsonl.zst files",
    "tensorboard": "--tensorboard-dir",
    "wandb": "--wandb project=NAME",
    "prometheus_client": "--prometheus",
    "matplotlib": "tools/plan.py --what-if ... --plot",
    "lm_eval": "tools/evaluate_harness.py",
    "fsspec": "runs in an object store (--save s3://...)",
    "s3fs": "s3://",
    "gcsfs": "gs://",
}


def main(argv: list[str]) -> None:
    """Prints the report. Raises RuntimeFailure when local ranks cannot talk to each other."""
    parser = ToolParser(description="What this machine has for megalite.")
    parser.add_argument("--skip-collectives", action="store_true", help="start no ranks, measure nothing")
    parser.add_argument("--stage-meshes", metavar="TPxDP,...", help="let as many ranks talk in these groups, not two")
    parser.add_argument("--disk", metavar="DIR", help="measure the disk of this folder (default: temporary files')")
    arguments = parser.parse_args(argv)
    if arguments.stage_meshes and arguments.skip_collectives:
        raise ConfigError(f"--stage-meshes={arguments.stage_meshes}: has no effect with --skip-collectives; drop one")
    print_environment()
    print_packages()
    print_launcher()
    if not arguments.skip_collectives:
        print_collectives(arguments.stage_meshes)
        print_memory(arguments.disk)
        print("\nready")


def print_environment() -> None:
    """Python, machine, torch and its devices."""
    import torch

    print("environment")
    _line("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    _line("host", f"{platform.node()}, {os.cpu_count()} cores, {_memory()}")
    _line("torch", f"{torch.__version__}, threads {torch.get_num_threads()}")
    # Counting devices does not initialise CUDA, so that ranks can still be forked below.
    devices = torch.cuda.device_count()
    _line("gpus", str(devices) if devices else "none: training runs on the CPU with gloo")
    if devices:
        hip = torch.version.hip  # ROCm's builds speak HIP under CUDA's names
        _line("hip" if hip else "cuda", str(hip or torch.version.cuda))


def _memory() -> str:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return "memory unknown"
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB of memory"


def print_packages() -> None:
    """Core packages, optional packages, and the apex question."""
    print("\npackages")
    for name in CORE:
        _line(name, _version(name) or "MISSING: run `pip install -e .`")
    print("\noptional packages")
    for name, extra in EXTRA_OF.items():
        version = _version(name)
        advice = "" if version else f": {install_command(extra)}"
        _line(name, f"{version or 'missing'} ({PURPOSES[name]}){advice}")
    _line("apex", apex_state())


def apex_state() -> str:
    """Whether a package called apex is NVIDIA's: the name belongs to a web toolkit on the package index.

    megalite does not need it: torch's fused AdamW, norms and attention take its place.
    """
    if importlib.util.find_spec("apex") is None:
        return "missing, and not needed: torch's fused AdamW and norms take its place"
    try:
        from apex.optimizers import FusedAdam
    except ImportError:
        return "another package of that name (it has no apex.optimizers.FusedAdam); not needed"
    return f"NVIDIA's ({FusedAdam.__module__}.FusedAdam imports); not needed"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def print_launcher() -> None:
    """What the environment says about who starts the ranks."""
    from megalite.launch import read_environment

    place = read_environment()
    print("\nlauncher")
    if place.launcher:
        _line(place.launcher, f"rank {place.rank} of {place.size}, local rank {place.local_rank} of {place.local_size}")
        _line("meeting point", f"{place.master_addr}:{place.master_port}")
    else:
        _line("none", "one process; --nprocs N starts local ranks; torchrun, srun and mpirun are recognised")


def print_collectives(meshes: str | None = None) -> None:
    """Two local ranks, or those of the meshes of stages, their results and their speed; on GPUs too where there are as
    many. Raises ConfigError."""
    import torch

    from collective_test import measure_local
    from megalite.config import parse_meshes, stage_sizes

    layout: dict[str, Any] = {"stage_meshes": meshes, **stage_sizes(meshes)} if meshes else {}
    ranks = sum(mesh.size for mesh in parse_meshes(meshes)) if meshes else 2
    for device in ["cpu"] + (["cuda"] if torch.cuda.device_count() >= ranks else []):
        print(f"\nlocal collective test on {device}", flush=True)
        measure_local(ranks, device, **layout)


def print_memory(disk: str | None) -> None:
    """What the host's memory, its disk and the link to a device move, as lines of a hardware file."""
    from memory_test import folder_of, measure_memory

    folder = folder_of(disk)
    print(f"\nmemory and disk ({folder}), for the file of tools/plan.py --hardware")
    try:
        measured = measure_memory(str(folder))
    except OSError as error:
        raise ConfigError(f"--disk={folder}: cannot be measured ({error.strerror}); give another folder") from error
    for name, rate in measured.items():
        print(f"  {name}: {rate:.2e}")


def _line(name: str, text: str) -> None:
    print(f"  {name:<22}{text}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
