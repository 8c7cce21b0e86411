"""Predicted memory against what there is: what is read of the machine, who shares it, what is refused, what helps."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

import pytest

from megalite import host_memory
from megalite.config import Config, parse
from megalite.errors import in_flags
from megalite.host_memory import Pool, host_pools
from megalite.inventory import given_plan, stage_layer_ranges
from megalite.planner import (
    PlannedStages,
    pipeline_memory,
)
from megalite.train import announcement
from megalite.train.announcement import judge
from megalite.train.planned import PlannedRun
from megalite.train.programs import ProgramCache
from pretrain_gpt import main

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 4 "
    "--global-batch-size 16 --lr 1e-2 --train-iters 1 --mock-data --vocab-size 64 --eval-iters 0 "
    "--device cpu --num-workers 0 --no-exit-signal-handler"
)
MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\nSwapTotal: 50 kB\nSwapFree: 40 kB\n"
V2 = {
    "memory.max": "500000",
    "memory.current": "400000",
    "memory.stat": "anon 1\ninactive_file 30000\nactive_file 20000\nslab_reclaimable 5000\nshmem 70000",
    "memory.swap.max": "10000",
    "memory.swap.current": "4000",
}
V1 = {
    "memory.limit_in_bytes": "500000",
    "memory.usage_in_bytes": "400000",
    "memory.stat": "active_file 1\ntotal_inactive_file 30000\ntotal_active_file 20000",
}


def machine(folder: Path, table: str, groups: dict[str, dict[str, str]]) -> list[Pool]:
    """The pools of a machine with these control groups."""
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": table, "proc/sys/kernel/random/boot_id": "b\n"}
    files |= {f"cgroup/{group}/{name}": text for group, values in groups.items() for name, text in values.items()}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return host_pools(None, folder / "proc", folder / "cgroup")


@pytest.mark.parametrize(
    ("table", "groups", "expected"),
    [
        ("0::/\n", {}, []),
        ("0::/a/b\n", {"a/b": V2}, [(155_000, 6_000)]),
        ("0::/a/b\n", {"a": V2, "a/b": V2 | {"memory.max": "max"}}, [(155_000, 6_000)]),  # the limit stands above
        ("0::/outside/a\n", {"": V2}, [(155_000, 6_000)]),  # as seen from inside a container
        ("4:cpu:/x\n3:memory:/a\n0::/\n", {"memory/a": V1}, [(150_000, 40_960)]),
        ("3:memory:/a\n", {"memory/a": V1 | {"memory.limit_in_bytes": "9223372036854771712"}}, []),
        ("3:memory:/a\n", {"memory/a": V1, "memory": V1}, [(150_000, 40_960)] * 2),
        ("0::/a\n", {"a": V2 | {"memory.current": "900000"}}, [(0, 6_000)]),  # the cache is more than what is over
        ("nonsense", {"a": {"memory.max": "nonsense"}}, []),
    ],
)
def test_what_is_free_on_a_host(
    table: str, groups: dict[str, dict[str, str]], expected: list[tuple[int, int]], tmp_path: Path
) -> None:
    host, *limited = machine(tmp_path, table, groups)
    assert (host.free, host.total, host.swap) == (600 * 1024, 1000 * 1024, 40 * 1024)
    assert [(pool.free, pool.swap) for pool in limited] == expected
    assert len({pool.key for pool in (host, *limited)}) == 1 + len(expected)


def test_an_unknown_system_has_no_pools(tmp_path: Path) -> None:
    assert host_pools(0, tmp_path, tmp_path) == []


def test_an_address_space_with_a_limit_is_a_pool_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (2**60, 2**60))
    own = [{pool.key: pool for pool in host_pools(rank)} for rank in (0, 1)]
    (key,) = own[0].keys() - own[1].keys()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    assert own[0][key].free == pytest.approx(2**60 - 4096 * pages, abs=2**30)
    assert not host_pools(None)[-1].name.endswith("ulimit -v)")


def settled(flags: str, world: int = 1) -> tuple[Config, Any, Any]:
    config = parse([*BASE.split(), *flags.split()], world_size=world)
    program = ProgramCache(config).full(world)
    return config, program, stage_layer_ranges(config, program)


def predicted(flags: str, world: int = 1) -> float:
    config, program, cuts = settled(flags, world)
    each = pipeline_memory(PlannedStages(config, world, program, cuts, given_plan(config), on_cpu=True))
    return sum(each[rank * program.num_ranks // world].total for rank in range(world))


def judged(flags: str, free: float, world: int = 1, *, hosts: int = 1, swap: float = 0.0) -> str | None:
    config, program, cuts = settled(flags, world)
    pools = [[(Pool(f"h{rank * hosts // world}", "host n", free / hosts, 9e15, swap), True)] for rank in range(world)]
    line = judge(PlannedRun(config, world, program, cuts, given_plan(config), on_cpu=True), pools)
    return None if line is None else in_flags(line)


def test_a_rank_is_warned_at_nine_tenths_and_refused_beyond_the_error(caplog: pytest.LogCaptureFixture) -> None:
    need = predicted("")
    for share, refused, warned in ((1.3, False, False), (1.12, False, False), (1.09, False, True), (0.96, False, True),
                                   (0.94, True, False), (0.01, True, False)):  # fmt: skip
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            line = judged("", share * need)
        assert (line is not None, bool(caplog.messages)) == (refused, warned), share
        for text in [line or "", *caplog.messages]:
            assert text == "" or text.startswith("predicted memory: 1 rank needs ")
    assert judged("", 0.9 * need, swap=0.1 * need) is None, "swap counts for a refusal"
    assert judged("--ignore-memory-estimate", 1.0) is None


def test_ranks_of_a_host_share_it() -> None:
    flags = "--pipeline-model-parallel-size 2"
    need = predicted(flags, 2)
    # What comes and goes inside a layer is counted once: between all of it and none, nothing is refused.
    assert judged(flags, 0.5 * need, 2) is not None
    assert judged(flags, 0.96 * need, 2) is None
    assert judged(flags, 0.5 * need, 2, hosts=2) is not None, "half of the memory on each of two hosts"
    assert judged(flags, 2.2 * need, 2, hosts=2) is None
    both = predicted("--num-layers 4", 2)
    assert judged("", 0.6 * both, 2) is not None and judged("", 1.2 * both, 2) is None


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ("--bf16 --seq-length 512", 0.7),  # a processor with products of its own keeps half of the activations
        ("--compile --seq-length 512", 0.55),
        ("--skip-train --eval-iters 1", 0.3),  # weights alone
        ("--tensor-model-parallel-size 2", 0.7),  # the memory that messages go through is one for both ranks
    ],
)
def test_what_the_estimate_may_overstate_refuses_nothing(flags: str, share: float) -> None:
    world = 2 if "tensor" in flags else 1
    assert judged(flags, share * predicted(flags, world), world) is None
    assert judged(flags, 0.01 * predicted(flags, world), world) is not None


def test_only_what_helps_is_named_with_what_is_then_needed() -> None:
    big = "--micro-batch-size 8 --seq-length 512 --max-position-embeddings 512"
    line = judged(big, 1e6)
    assert line is not None and "--micro-batch-size=1 (" in line and "--recompute-granularity=full (" in line
    assert "zero-stage" not in line and "parallel-size" not in line, "one rank has nobody to share with"
    line = judged("--micro-batch-size 1 --hidden-size 512", 1e6, 4)
    assert line is not None and "--zero-stage=3 (" in line and "--tensor-model-parallel-size=2 (" in line
    assert "micro-batch" not in line and line.endswith("or continue by --ignore-memory-estimate")


def tiny(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(announcement, "host_pools", lambda rank: [Pool("m", "host n", free, 2e9)])


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--nprocs", "2"]], ids=["one", "dry-run", "two"])
def test_a_run_that_can_not_fit_is_one_line(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny(monkeypatch, 1e6)
    assert main([*BASE.split(), *more]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        line.startswith("error: predicted memory: ")
        and "host n has 1 MB free of 2 GB; what helps, though none alone: " in line
    )
    assert main([*BASE.split(), *more, "--ignore-memory-estimate"]) == 0


@pytest.mark.parametrize(
    "flags",
    [
        "--vocab-size 1e12",
        "--hidden-size 1e6",
        "--hidden-size 1e20 --num-attention-heads 1",
        "--seq-length 1e9",
        "--ffn-hidden-size 1e12",
        "--kv-channels 1e9",
        "--max-position-embeddings 1e13",
        "--make-vocab-size-divisible-by 1e15",
        "--micro-batch-size 1e9 --global-batch-size 1e9",
        "--num-layers 200 --hidden-size 1e5 --num-attention-heads 1",
    ],
)
def test_sizes_that_no_machine_has_are_one_line(flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE.split(), *flags.split(), "--dry-run"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: predicted memory: ")


def test_free_memory_is_that_of_the_tightest_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "host_pools", lambda rank: [Pool("a", "", 7.0, 9.0, 1.0), Pool("b", "", 8.5, 9.0)])
    assert host_memory.free_memory() == 8.0
    monkeypatch.setattr(host_memory, "host_pools", lambda rank: [])
    assert host_memory.free_memory() == float("inf")
