"""The warm process from which every rank of every test is forked.

Started once per process that asks, as `python -m megalite.testing.zygote FD [MODULE ...]`. It pays for the imports
once (torch, torch._dynamo, which the first optimizer would otherwise import in every rank, and the modules named: of
tests pytest, which a user has not), and never runs a tensor operation: a process that has computed with several OpenMP
threads cannot be forked safely.
"""

import contextlib
import gc
import importlib
import os
import pkgutil
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from megalite.launch import Outcome, die_with_parent, supervise
from megalite.testing.case import Case, rank_body

SHARED_PACKAGES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.export._trace",
    "safetensors.torch",
    "megalite.testing.wire",
)


def zygote_environment(environment: dict[str, str]) -> dict[str, str]:
    """Environment for the zygote: one thread per rank, gloo on the loopback interface, connected at first use."""
    settings = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_GLOO_LAZY_INIT": "1"}
    # Whether there are GPUs is asked without touching the CUDA driver, which does not survive a fork.
    settings["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if sys.platform == "linux":
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    return environment | settings


def main() -> None:
    """Serves cases from the inherited connection until pytest closes it."""
    die_with_parent(os.getppid())
    connection = Connection(int(sys.argv[1]))
    _import_everything(sys.argv[2:])
    while True:
        try:
            case: Case = connection.recv()
        except EOFError:
            return
        connection.send(_run(case))


def _run(case: Case) -> Outcome:
    """Forks the ranks of one case and waits for them."""
    return supervise(
        case.size,
        lambda rank, page: rank_body(case, rank, page.set_phase),
        hang_seconds=case.peer_timeout + 2,
        deadline_seconds=case.timeout,
        grace_seconds=1.0,
    )


def _import_everything(more: Sequence[str]) -> None:
    """Imports what ranks need; a product module that does not import shows its error in the rank that needs it."""
    for name in (*SHARED_PACKAGES, *more):
        importlib.import_module(name)
    import torch

    import megalite

    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(megalite.__path__, "megalite.", onerror=lambda _name: None):
        if not module.name.startswith("megalite.testing."):
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)
    _read_tables()
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, f"the zygote must have one thread: {threading.enumerate()}"


def _read_tables() -> None:
    """The tables of flags, which every rank would else make once more: by a configuration that is read and written."""
    from megalite.config import dump_yaml
    from megalite.config.cli import parse

    sizes = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "8"]
    with contextlib.suppress(Exception):  # a fault in there is for the rank that meets it
        dump_yaml(parse([*sizes, "--micro-batch-size", "1", "--train-iters", "1", "--mock-data"], world_size=1))


if __name__ == "__main__":
    main()
