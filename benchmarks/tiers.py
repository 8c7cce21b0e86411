"""Memory in tiers: what moves beside a computation should cost nothing until it is longer, then what it takes itself.

    python benchmarks/tiers.py                                    # activations, the host's step, a file
    python benchmarks/tiers.py --quick --check                    # compared with baseline.json

The link is slow on purpose, a sleep for each byte, and computing sleeps too, so that the figures are those of the order
in which things happen and not of this machine. Our own code moves everything: the executor and the stages of a program
with EVICT and PREFETCH, `--delayed-parameter-update`'s thread, and the file of `--offload path`.

Variants: `compute` with a link that takes no time, `link` with computing that takes none, `in-turns` one after the
other, and `megalite`. Bar: megalite within 10 % of the longer of the first two: one of its ratios is at least 0.91.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import Benchmark, Flag
from benchmarks.turns import Case, Place, Variant, folder_of

if TYPE_CHECKING:
    from torch import Tensor

    from megalite.parallel.pipeline import OffloadedStage, Stage
    from megalite.parallel.tiers import Arrival, Pairs, SavedTensors
    from megalite.schedule import Program

VARIANTS = ("megalite", "compute", "link", "in-turns")
FLAGS = {
    "what": Flag("what moves", ["activations", "weights", "step", "file"], ["activations", "weights", "step", "file"]),
    "ratios": Flag("how many times as long as computing the link takes", [0.5, 1.0, 2.0], [0.5, 2.0]),
    "milliseconds": Flag("of computing in each call", 1024, 256),
}
MICROBATCHES, ROOM, KEPT = 128, 4, 1 << 16
SMALL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 12 --train-iters 1000 --lr 1e-3 --mock-data --vocab-size 256 --eval-iters 0 --num-workers 0 "
    "--offload params --untie-embeddings-and-output-weights"
)
BATCHES = 16
BUCKET, FEW, MANY = 1 << 14, 4, 32


def cases(args: argparse.Namespace) -> list[Case]:
    found = []
    for what in args.what:
        for ratio in args.ratios:
            settings = {"what": what, "ratio": ratio, "compute": args.milliseconds / 1000}
            pairs = ("megalite", "compute"), ("megalite", "link")
            found.append(Case(f"{what}, link {ratio:g} x compute", VARIANTS, pairs, settings, base="in-turns"))
    return found


def build(name: str, case: Case, place: Place) -> Variant:
    compute = 0.0 if name == "link" else case.settings["compute"]
    link = 0.0 if name == "compute" else case.settings["compute"] * case.settings["ratio"]
    made = {"activations": activations, "weights": weights, "step": host_step, "file": file_step}
    return Variant(made[case.settings["what"]](compute, link, name == "in-turns", folder_of(place, name)))


def activations(compute: float, link: float, in_turns: bool, folder: Path) -> Callable[[], object]:
    """A batch of GPipe on one rank with room for a few micro-batches; a forward takes as long as a backward."""
    import torch

    from megalite.parallel.tiers import Mover, SavedTensors
    from megalite.schedule import EVICT, ActivationRoom, build_program, insert_transfers, lower

    room = ActivationRoom((1.0,), (0.0,), (float(ROOM),))
    program = lower(insert_transfers(build_program("gpipe", 1, MICROBATCHES), room))
    transfers = 2 * sum(action.kind == EVICT for action in program.unroll(1)[0])
    per_byte = link / transfers / KEPT

    mover = Mover(torch.device("cpu"))
    slow_down(mover, in_turns)["per byte"] = per_byte
    stage = one_layer(SavedTensors(mover), lambda kind: time.sleep(compute / MICROBATCHES / 2))
    return lambda: run_batch(program, stage)


def one_layer(saved: SavedTensors, compute: Callable[[str], None]) -> OffloadedStage:
    """A stage that keeps `KEPT` bytes of a micro-batch. compute: what its forward ("F") and its backward ("B") do."""
    import torch

    from megalite.comm import TensorSpec
    from megalite.gradient import WeightGradQueue
    from megalite.parallel.pipeline import OffloadedStage

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            ctx.save_for_backward(torch.full((KEPT,), 7, dtype=torch.uint8))
            compute("F")
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            assert ctx.saved_tensors[0].eq(7).all()
            compute("B")
            return gradients[0].view(1)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor | None, microbatch: object) -> Tensor:
            apply: Any = Product.apply
            out: Tensor = apply(self.weight)
            return out

    spec = TensorSpec((1,), torch.float32, torch.device("cpu"))
    return OffloadedStage([Layer()], WeightGradQueue(), spec=spec, is_first=True, is_last=True, saved=saved)


def run_batch(program: Program, stage: Stage) -> None:
    """A batch of a program of one rank and one stage."""
    import torch

    from megalite.comm import Channel, ParallelMesh
    from megalite.parallel.pipeline import Events, Executor

    class Source:
        def arranged(self, x: Tensor) -> Tensor:
            return x

        def get(self, microbatch: int) -> tuple[Source, Tensor]:
            return self, torch.ones(())

    axis = ParallelMesh.single()["pp"]
    executor = Executor(0, {(0, 0): stage}, program.placement, Channel(axis, axis, ()), Events())
    for _ in executor.run(program.unroll(1)[0], Source()):
        pass  # nobody has the weights


def weights(compute: float, link: float, in_turns: bool, folder: Path) -> Callable[[], object]:
    """A batch with `--offload params`: a layer's weights and gradients are on the device while it uses them. A
    backward takes three forwards, and so does what moves beside it: a weight comes, a gradient comes and goes."""
    import torch

    from megalite.comm import World
    from megalite.config import parse
    from megalite.train import open_run

    torch.manual_seed(0)
    config = parse([*SMALL.split(), "--data-cache-path", str(folder)], world_size=1)
    run = open_run(config, World()).__enter__()  # until the process ends
    (stage,) = run.trainer.executor.stages.values()
    model: Any = stage.modules[0]
    layers = model.ordered()
    unit = compute / (4 * len(layers) * config.num_microbatches(1))
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: time.sleep(unit))
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(3 * unit))
    made = next(made for each in run.state.model.buffers.values() for made in each)
    pace = slow_down(made.rank_memory.mover, in_turns)
    run.trainer.train_step(drain=True)
    pace["per byte"] = link / pace["moved"]
    return lambda: run.trainer.train_step(drain=True)


def slow_down(mover: Any, in_turns: bool) -> dict[str, float]:
    """Counts the bytes "moved" by a `Mover`, which from now on sleeps "per byte"."""
    pace, copy, move = {"moved": 0.0, "per byte": 0.0}, mover.copy, mover.move

    def slow_move(pairs: Pairs) -> None:
        nbytes = sum(target.nbytes for target, _ in pairs)
        pace["moved"] += nbytes
        time.sleep(pace["per byte"] * nbytes)
        move(pairs)

    def copy_in_turns(pairs: Pairs, **how: Any) -> Arrival:
        arrival: Arrival = copy(pairs, **how)
        arrival.wait()
        return arrival

    mover.move = slow_move
    mover.copy = copy_in_turns if in_turns else copy
    return pace


def optimizer_of(kind: str, buckets: int, folder: Path | None) -> Any:
    """An optimizer over parameters in bf16 whose masters and moments are not on the device."""
    import torch

    from megalite.comm import ParallelMesh
    from megalite.config import OptimizerConfig
    from megalite.optim import OPTIMIZERS
    from megalite.parallel.zero import DelayedOptimizer, ParameterBuffers, ShardedOptimizer, ZeroOptions

    names = [f"w{number}" for number in range(buckets)]
    versions = [
        [(name, torch.nn.Parameter(torch.zeros(BUCKET, dtype=torch.bfloat16))) for name in names]
        for _ in range(2 if kind == "delayed" else 1)
    ]
    mesh = ParallelMesh.single()
    buffers = ParameterBuffers(versions, axes=mesh.family(), options=ZeroOptions(bucket_size=BUCKET))
    return (DelayedOptimizer if kind == "delayed" else ShardedOptimizer)(
        [buffers],
        make_optimizer=lambda groups: OPTIMIZERS["adam"](groups, OptimizerConfig(lr=1e-3)),
        norm_axis=mesh.world,
        offload_fraction=1.0,
        offload_path=None if folder is None else str(folder),
    )


def train(optimizer: Any, batches: int, compute: float) -> None:
    """Batches of no gradient."""
    for number in range(batches):
        time.sleep(compute)
        for buffers in optimizer.buffers:
            buffers.gradients.start_reduce()
            buffers.gradients.finish_reduce()
        optimizer.step(lr=1e-3, weight_decay=0.0, version=number + 1)
        for buffers in optimizer.buffers:
            buffers.gradients.begin_batch()
    optimizer.finish_step()


def slow_rules(optimizer: Any, before: Callable[[Any], None]) -> None:
    """`before` is called with each sub-optimizer ahead of its rule's step."""

    def slowed(sub: Any, step: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            before(sub)
            step()

        return run

    for sub in optimizer.sub_optimizers:
        sub.rule.step = slowed(sub, sub.rule.step)


def host_step(compute: float, link: float, in_turns: bool, folder: Path) -> Callable[[], object]:
    """Batches on the device; what the host reads and writes of masters and moments takes the link's time."""
    optimizer = optimizer_of("plain" if in_turns else "delayed", FEW, None)
    per_byte = link / BATCHES / optimizer.memory()["offloaded"]

    def move(sub: Any) -> None:
        states = [*(master.tensor for master in sub.masters)]
        states += [moment for master in sub.masters for moment in sub.moments(master).values()]
        time.sleep(per_byte * sum(state.nbytes for state in states))

    slow_rules(optimizer, move)
    return lambda: train(optimizer, BATCHES, compute / BATCHES)


class SlowDisk:
    """A disk that does one thing at a time, in the order in which it is asked for."""

    def __init__(self, per_byte: float, *, ahead: bool) -> None:
        self.per_byte, self.ahead = per_byte, ahead
        self._free = 0.0
        self._there: dict[int, float] = {}

    def announce(self, regions: Iterable[mmap.mmap]) -> None:
        """Begins to read."""
        if self.ahead:
            self._read(regions)

    def use(self, regions: Iterable[mmap.mmap]) -> None:
        """Waits until they have been read."""
        regions = list(regions)
        self._read(region for region in regions if id(region) not in self._there)
        self._sleep_until(max(self._there[id(region)] for region in regions))

    def let_go(self, regions: Iterable[mmap.mmap]) -> None:
        """Begins to write what has been read and changed."""
        changed = [region for region in regions if self._there.pop(id(region), None) is not None]
        self._free = self._after(sum(map(len, changed)))
        if not self.ahead:
            self.finish()

    def finish(self) -> None:
        """Waits until all is written."""
        self._sleep_until(self._free)

    def _read(self, regions: Iterable[mmap.mmap]) -> None:
        for region in regions:
            self._free = self._there[id(region)] = self._after(len(region))

    def _after(self, nbytes: int) -> float:
        return max(time.perf_counter(), self._free) + nbytes * self.per_byte

    def _sleep_until(self, when: float) -> None:
        time.sleep(max(0.0, when - time.perf_counter()))


def file_step(compute: float, link: float, in_turns: bool, folder: Path) -> Callable[[], object]:
    """One step bucket by bucket: the rule computes on one while the next is read and the last written."""
    optimizer = optimizer_of("plain", MANY, folder)
    disk = SlowDisk(link / (2 * optimizer.file.nbytes), ahead=not in_turns)
    optimizer.file.announce, optimizer.file.let_go = disk.announce, disk.let_go

    def work(sub: Any) -> None:
        disk.use(sub.regions)
        time.sleep(compute / MANY)

    slow_rules(optimizer, work)

    def run() -> None:
        train(optimizer, 1, 0.0)
        disk.finish()

    return run


BENCHMARK = Benchmark("tiers", __doc__, FLAGS, cases, build, VARIANTS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
