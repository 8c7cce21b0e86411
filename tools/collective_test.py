"""Do all ranks of a run reach each other, are their sums right, and how fast are the links?

    python tools/collective_test.py --nprocs 4 --tensor-model-parallel-size 2
    torchrun <flags of torchrun> tools/collective_test.py --tensor-model-parallel-size 8 --hardware h100

Every group of the layout is tried, all groups of a kind at once, as they work in training: results are checked, and the
slowest group counts and is named. Then each rank passes a message to its neighbour, inside its node and between the
nodes; with --hardware the rates stand beside those of that file, which tools/plan.py plans with, without it they are
printed as such a file has them.

Bus bandwidth of an operation on n bytes over r ranks: the bytes that each rank must send in the best algorithm,
2 (r - 1) / r * n of an all-reduce and (r - 1) / r * n of the others, over the time.

Exit status 0: every group works. 2: a flag is wrong. Otherwise the rank that failed is named.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import ToolParser, run_tool
from layout_flags import ToolSettings, add_layout_flags, run_on_ranks
from megalite.config import DeviceOptions, ParallelConfig
from megalite.errors import ConfigError, RuntimeFailure
from megalite.launch import launch
from megalite.planner import Hardware, available, load_hardware

if TYPE_CHECKING:
    import torch

    from megalite.comm import Axis, ParallelMesh, World

SMALL, LARGE = 4 * 1024, 32 * 1024 * 1024
"""Bytes of the messages whose time is a latency, and whose rate is a bandwidth."""
REPEATS = 5
KINDS = ("world", "tp", "cp", "pp", "dp", "etp", "ep", "edp")
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the flags. Raises ConfigError."""
    parser = ToolParser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = ", ".join(available())
    parser.add_argument("--hardware", metavar="NAME|FILE", help=f"compare with {names}, or a YAML file like theirs")
    add_layout_flags(parser)
    flags = parser.parse_args(argv)
    flags.expected = load_hardware(flags.hardware) if flags.hardware is not None else None
    return flags


def measure_local(size: int, device: str, **layout: Any) -> None:
    """Forks `size` ranks on this machine, before it has computed anything (see `supervise`), and prints what the test
    finds. device: "cpu" (gloo) or "cuda" (NCCL, one GPU a rank). layout: fields of `ParallelConfig`. Raises
    RuntimeFailure where it fails."""
    hardware = DeviceOptions(device=device)
    parallel = ParallelConfig(nprocs=size, hardware=hardware, distributed_timeout_minutes=1.0, **layout)

    def rank(settings: ToolSettings, world: World) -> None:
        _test(settings.parallel, world, None)

    if launch(ToolSettings(parallel, ()), rank) != 0:
        raise RuntimeFailure(f"{size} local ranks cannot work together on {device}: see above")


def _test(parallel: ParallelConfig, world: World, expected: Hardware | None) -> None:
    """The test as one rank lives it; rank 0 prints. Raises RuntimeFailure where a result is wrong."""
    from megalite.comm import all_gather_json
    from megalite.train import make_mesh

    if world.size < 2:
        raise ConfigError(
            "`nprocs`=1: one rank has nobody to talk to; give `nprocs` 2 or more, or start it by torchrun"
        )
    world.report_phase("forming groups")
    mesh = make_mesh(parallel, world)
    bench = Bench(world, mesh.world)
    hosts = all_gather_json(world.host, mesh.world)
    node, between = _links(hosts, world.rank)
    bench.say(f"{world.size} ranks on {_hosts(hosts)}, {world.device.type}; {mesh}")
    bench.say(f"\n{'group':<7}{'ranks':<16}{'operation':<16}{'4 KiB':>12}{'32 MiB, bus':>14}   slowest group")
    for name, (axis, groups) in _groups(mesh).items():
        for operation in OPERATIONS:
            world.report_phase(f"{operation} of {name}")
            _check(name, axis, operation, world.device, hosts)
            _row(bench, name, axis, operation, groups)
    bench.say("")
    _compare(bench, "intra_node", "inside a node", node, expected, hosts)
    _compare(bench, "inter_node", "between nodes", between, expected, hosts)


def _groups(mesh: ParallelMesh) -> dict[str, tuple[Axis, list[tuple[int, ...]]]]:
    """The kinds of groups that a run of this layout has: this rank's axis, and all groups. A rank may be alone in its
    own, where stages differ."""
    from megalite.comm import all_gather_json

    kinds: dict[str, tuple[Axis, list[tuple[int, ...]]]] = {}
    for name in KINDS:
        axis = mesh[name]
        groups = sorted({tuple(ranks) for ranks in all_gather_json(list(axis.ranks), mesh.world) if len(ranks) > 1})
        if groups and groups not in [other for _, other in kinds.values()]:
            kinds[name] = axis, groups
    return kinds


def _links(hosts: Sequence[str], rank: int) -> tuple[Axis, Axis]:
    """The ranks of this rank's node, and those of the same place in all nodes."""
    from megalite.comm import make_axis

    nodes: dict[str, list[int]] = {}
    for number, host in enumerate(hosts):
        nodes.setdefault(host, []).append(number)
    places = [[rank for rank in ranks if rank is not None] for ranks in zip_longest(*nodes.values())]
    return make_axis("node", [*nodes.values()], rank, share=False), make_axis("between", places, rank, share=False)


def _hosts(hosts: Sequence[str]) -> str:
    different = list(dict.fromkeys(hosts))
    count, more = len(different), ", ..." * (len(different) > 4)
    return f"{count} host{'s' * (count > 1)} ({', '.join(different[:4])}{more})"


@dataclass(frozen=True)
class Bench:
    """Times actions that all ranks begin together."""

    world: World
    everyone: Axis

    def say(self, text: str) -> None:
        """Prints on rank 0."""
        if self.world.is_first:
            print(text, flush=True)

    def slowest(self, action: Callable[[], object], axis: Axis) -> tuple[float, list[int]]:
        """Seconds and ranks of the slowest group: the median of a few times after one that does not count. Collective
        over the world."""
        import torch

        from megalite.comm import all_gather_json, barrier

        times = []
        for _ in range(REPEATS + 1):
            barrier(self.everyone)
            start = time.perf_counter()
            if axis.size > 1:
                action()
                if self.world.device.type == "cuda":
                    torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        own = statistics.median(times[1:]) if axis.size > 1 else 0.0
        seconds, ranks = max(all_gather_json([own, axis.ranks], self.everyone))
        return seconds, ranks


def _row(bench: Bench, name: str, axis: Axis, operation: str, groups: Sequence[tuple[int, ...]]) -> None:
    """One line of the table: of groups of one kind."""
    latency, _ = bench.slowest(_action(axis, operation, SMALL, bench.world.device), axis)
    seconds, ranks = bench.slowest(_action(axis, operation, LARGE, bench.world.device), axis)
    sizes, count = [str(len(group)) for group in groups], len(groups)
    sent = (2 if operation == "all-reduce" else 1) * (len(ranks) - 1) / len(ranks) * LARGE
    of = ",".join(sizes) if len(set(sizes)) > 1 else f"{count} x {sizes[0]}" if count > 1 else sizes[0]
    slow = f"ranks {_listed(ranks)}" if count > 1 else ""
    small, rate = f"{latency * 1e3:.3f} ms", f"{sent / seconds / 1e9:.2f} GB/s"
    bench.say(f"{name:<7}{of:<16}{operation:<16}{small:>12}{rate:>14}   {slow}".rstrip())


def _action(axis: Axis, operation: str, nbytes: int, device: torch.device) -> Callable[[], object]:
    import torch

    from megalite.comm import all_gather_into, all_reduce_, all_to_all, reduce_scatter_into

    part = max(1, nbytes // 4 // axis.size)
    whole, own = torch.zeros(part * axis.size, device=device), torch.zeros(part, device=device)
    return {
        "all-reduce": lambda: all_reduce_(whole, axis),
        "all-gather": lambda: all_gather_into(whole, own, axis),
        "reduce-scatter": lambda: reduce_scatter_into(own, whole, axis),
        "all-to-all": lambda: all_to_all(whole.view(axis.size, part), axis),
    }[operation]


def _check(name: str, axis: Axis, operation: str, device: torch.device, hosts: Sequence[str]) -> None:
    """Raises RuntimeFailure where the result on this rank is not what arithmetic says."""
    import torch

    from megalite.comm import all_gather, all_reduce_, all_to_all, reduce_scatter

    n, numbers = axis.size, torch.tensor(axis.ranks, dtype=torch.float32, device=device) + 1
    own, columns = numbers[axis.rank], torch.arange(n, dtype=torch.float32, device=device)
    part = torch.ones(1000, device=device)
    if operation == "all-reduce":
        found, right = own * part, numbers.sum() * part
        all_reduce_(found, axis)
    elif operation == "all-gather":
        found, right = all_gather((own * part)[None], axis), numbers[:, None] * part
    elif operation == "reduce-scatter":
        found = reduce_scatter((own + columns)[:, None] * part, axis)
        right = (numbers.sum() + n * axis.rank) * part[None]
    else:
        found = all_to_all((own + 1000 * columns)[:, None] * part, axis)
        right = (numbers + 1000 * axis.rank)[:, None] * part
    if not torch.equal(found, right):
        place = (found != right).flatten().nonzero()[0]
        got, wanted = found.flatten()[place].item(), right.expand_as(found).flatten()[place].item()
        where = f"ranks {_listed(axis.ranks)} on {_hosts([hosts[rank] for rank in axis.ranks])}"
        raise RuntimeFailure(f"{operation} of {name} ({where}) gave {got:g} instead of {wanted:g}")


def _compare(bench: Bench, field: str, name: str, axis: Axis, expected: Hardware | None, hosts: Sequence[str]) -> None:
    """Each rank to its neighbour, all at once: latency, and the rate of a device in one direction."""
    import torch

    from megalite.comm import all_gather_json, start_shift

    if max(all_gather_json(axis.size, bench.everyone)) == 1:
        bench.say(f"{name}: not measured, {'there is one node' if field == 'inter_node' else 'a node has one rank'}")
        return
    bench.world.report_phase(f"messages {name}")
    small, large = (torch.ones(nbytes // 4, device=bench.world.device) for nbytes in (SMALL, LARGE))
    latency, _ = bench.slowest(lambda: start_shift(small, axis).wait(), axis)
    seconds, ranks = bench.slowest(lambda: start_shift(large, axis).wait(), axis)
    rate, delay = LARGE / seconds, f", {latency * 1e6:.0f} us"
    bench.say(f"{field}: {{bandwidth: {rate:.3g}, latency: {latency:.2g}}}")
    if expected is not None:
        planned: Any = getattr(expected, field)
        share = f"{rate / planned.bandwidth:.0%} of the {planned.bandwidth / 1e9:.3g} of {expected.name}"
        delay = f", {share}; {latency * 1e6:.0f} us, there {planned.latency * 1e6:.0f}"
    slow = f"slowest: ranks {_listed(ranks)} on {_hosts([hosts[rank] for rank in ranks])}"
    bench.say(f"  {name}: {rate / 1e9:.3g} GB/s a device in one direction{delay}; {slow}")


def _listed(ranks: Sequence[int]) -> str:
    return " ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def main(argv: list[str]) -> int:
    """Runs the tool; the exit status."""
    return run_on_ranks(lambda flags, world: _test(flags.parallel, world, flags.expected), parse(argv))


if __name__ == "__main__":
    sys.exit(run_tool(main))
