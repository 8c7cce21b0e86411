"""Faults of an object store and kills of its writers: what is committed loads bit for bit, whatever happened.

The store is moto behind a proxy that fails on purpose (`store_server.py`).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from store_server import KINDS, FaultProxy, make_bucket, moto_server, random_plan

from megalite.checkpoint import Checkpointer, CheckpointReader, resolve_checkpoint, step_of, sweep_staging
from megalite.checkpoint.lease import RunLease
from megalite.comm.mesh import Axis, ParallelMesh
from megalite.comm.rectangles import TensorShard
from megalite.comm.world import World
from megalite.stores import StoreUrl, place
from megalite.stores import store as store_module
from megalite.testing import run_ranks, run_single, try_ranks
from tests.cli.typed import body_command

sys.path.append(str(Path(__file__).parents[1] / "unit" / "checkpoint"))
from checkpoint_layouts import holds, make_model, random_layout  # noqa: E402

WORLD = 3  # rank 0 coordinates; rank 2 holds nothing and writes nothing
BLOCK = 4096


@pytest.fixture(scope="module")
def moto() -> Iterator[int]:
    with moto_server() as port:
        yield port


@pytest.fixture
def proxy(moto: int) -> Iterator[FaultProxy]:
    served = FaultProxy(moto)
    yield served
    served.shutdown()


@pytest.fixture
def url(moto: int, request: pytest.FixtureRequest) -> str:
    name = f"b{abs(hash(request.node.nodeid)) % 10**12}"
    make_bucket(moto, name)
    return f"s3://{name}/runs/a"


def hurry() -> None:
    """Pauses between attempts as short as a test can bear."""
    store_module.FIRST_PAUSE, store_module.LONGEST_PAUSE = 0.002, 0.02


def shards_of(step: int, rank: int, *, fill: bool = True) -> list[TensorShard]:
    layout = random_layout(make_model(step), WORLD - 1, random.Random(step), fill=fill)
    return [*layout, []][rank]


def save_steps(world: World, url: str, staging: str, steps: list[int], background: bool, keep_last: int | None) -> int:
    """Saves under the lease, as a run does; returns how often requests were repeated."""
    hurry()
    axis = ParallelMesh.build(rank=world.rank, size=world.size).world
    where = place(url)
    assert isinstance(where, StoreUrl)
    lease = RunLease(where) if world.rank == 0 else None
    if lease is not None:
        lease.acquire()
        sweep_staging(Path(staging))  # others have nothing there before they meet this rank in `check_room`
    saver = Checkpointer(url, world=axis, staging=Path(staging), lock=lease, keep_last=keep_last, block_bytes=BLOCK)
    saver.check_room(shards_of(1, world.rank))
    for step in steps:
        files = {"tokenizer.json": b"{}"}
        saver.save(step, shards_of(step, world.rank), {"step": step}, files, background=background)
    saver.wait()
    if lease is not None:
        lease.release()
    return where.store.retries


def load_newest(world: World, url: str) -> int:
    """Loads everything of the newest checkpoint in one process and compares bit for bit."""
    hurry()
    saver = Checkpointer(url, world=Axis.single("world"))
    path = resolve_checkpoint(url)
    step = step_of(path)
    model = make_model(step)
    shards = [TensorShard(n, tuple(t.shape), (0,) * t.dim(), torch.zeros_like(t)) for n, t in model.items()]
    assert saver.load(path, shards) == {"step": step}
    holds(model, [shards])
    return step


POINTS = {
    "save.begin": (0, 1, 2),
    "save.half_shard": (0, 1),
    "upload.begin": (0, 1),
    "upload.sent": (0, 1),
    "save.before_manifest": (0,),
    "save.before_rename": (0,),
    "save.after_rename": (0,),
    "save.gc": (0,),
}


def one_fault(seed: int, url: str, staging: Path, proxy: FaultProxy) -> tuple[bool, int]:
    """Step 10 is committed; then a kill at a random point of saving step 20, with a tenth of all requests failing.

    Returns whether the kill came late enough for 20 to be committed, and the step that loads.
    """
    rng = random.Random(seed)
    proxy.plan = lambda method, path: None
    env, where = proxy.environment, str(staging)
    run_ranks(save_steps, WORLD, url, where, [10], False, None, env=env)
    proxy.plan = random_plan(seed, 0.1)
    point = rng.choice([*POINTS])
    rank = rng.choice(POINTS[point])
    fault = f"kill@{point}:rank={rank}:step={10 if point == 'save.gc' else 20}"
    case = try_ranks(
        save_steps, WORLD, url, where, [20], rng.random() < 0.5, 1, faults=[fault], env=env, peer_timeout=60
    )
    assert case.outcome.culprit is not None and case.outcome.culprit.rank == rank, case.describe()
    late = point in ("save.after_rename", "save.gc")
    return late, run_single(load_newest, url, env=env)


def cases(few: int, many: int) -> list[object]:
    return [pytest.param(seed, marks=pytest.mark.landing if seed < few else pytest.mark.full) for seed in range(many)]


@pytest.mark.parametrize("seed", cases(1, 200))
def test_kills_and_faults_leave_the_newest_commit_whole(tmp_path: Path, url: str, proxy: FaultProxy, seed: int) -> None:
    late, step = one_fault(seed, url, tmp_path, proxy)
    assert step == (20 if late else 10)
    proxy.plan = lambda method, path: None
    run_ranks(save_steps, WORLD, url, str(tmp_path), [30], False, 1, env=proxy.environment)
    names = sorted(
        {name.partition("/")[0].partition(".")[0] for name in run_single(names_in, url, env=proxy.environment)}
    )
    assert names == ["iter_0000030", "latest_checkpointed_iteration"], "nothing is left of what was interrupted"
    assert list(tmp_path.glob("iter_*")) == []


def names_in(world: World, url: str) -> list[str]:
    where = place(url)
    assert isinstance(where, StoreUrl)
    return where.store.names(where.key)


def test_retries_are_counted_and_faults_do_not_show(tmp_path: Path, url: str, proxy: FaultProxy) -> None:
    proxy.plan = random_plan(7, 0.25)
    retries = run_ranks(save_steps, WORLD, url, str(tmp_path), [10, 20, 30], True, 2, env=proxy.environment)
    for _ in range(20):  # which request meets which fault depends on the order in which ranks come
        assert run_single(load_newest, url, env=proxy.environment) == 30
        if set(proxy.seen) >= {*KINDS} - {"frozen"}:
            break
    repeated = sum(proxy.seen[kind] for kind in ("500", "503", "cut", "lost"))
    assert 0 < sum(retries) and proxy.seen["flip"] > 0 and repeated > 0
    assert set(proxy.seen) >= {*KINDS} - {"frozen"}


TINY = (
    "pretrain_gpt.py --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --device cpu --fp64 "
    "--log-interval 1 --eval-iters 0 --lr-decay-style constant"
)


@pytest.mark.landing
def test_a_run_and_its_tools(tmp_path: Path, url: str, proxy: FaultProxy) -> None:
    """Trained, stopped, taken up by two tensor-parallel ranks: the weights of a run on a disk, to the bit where it has
    one process; and the tools read what is there."""
    staging = f"--checkpoint-staging-path {tmp_path / 'staging'}"
    commands = [
        f"{TINY} --train-iters 4 --save {url} {staging}",
        f"{TINY} --train-iters 8 --save {url} --auto-resume --use-checkpoint-args --save-interval 2 {staging}",
        f"{TINY} --train-iters 4 --save disk",
        f"{TINY} --train-iters 8 --save disk --auto-resume --save-interval 2",
        f"tools/inspect_checkpoint.py {url} --verify --json",
        f"tools/generate_text.py --load {url}/iter_0000006 --prompt 5 --max-new-tokens 2",
        f"tools/convert_checkpoint.py --from megalite --to hf --load {url} --save hf",
    ]
    said = [run_single(body_command, str(tmp_path), f"python {line}", env=proxy.environment) for line in commands]
    assert [status for status, _ in said] == [0] * len(commands), said
    assert '"damaged": []' in said[4][1] and '"step": 8' in said[4][1]
    assert run_single(same_tensors, url, str(tmp_path / "disk"), env=proxy.environment) > 50
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "staging" / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("start") == 2 and kinds.count("save") == 3
    refused = run_single(
        body_command, str(tmp_path), f"python {TINY} --train-iters 9 --save {url}", env=proxy.environment
    )
    assert refused[0] == 2 and "holds checkpoints already (newest iter_0000008)" in refused[1]


def same_tensors(world: World, first: str, second: str) -> int:
    """How many tensors two newest checkpoints have, all equal bit for bit."""
    one, other = CheckpointReader(resolve_checkpoint(first)), CheckpointReader(resolve_checkpoint(second))
    assert one.names == other.names
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.names)
    return len(one.names)
