"""tools/collective_test.py: every group of a layout, wrong results by name, links between nodes beside a file's."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from pathlib import Path

import pytest

import collective_test
from layout_flags import layout_of
from megalite.comm import World
from megalite.config import ParallelConfig
from megalite.config.parallel import ExpertParallelism
from megalite.errors import ConfigError
from megalite.planner import load_hardware
from megalite.testing import run_ranks, run_single
from tests.cli.typed import body_command

TP2_PP2 = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


def body_test(world: World, parallel: ParallelConfig, per_node: int, broken: str = "") -> str:
    """The output of the test, of ranks that say that `per_node` of them are on a node. broken: a collective of torch's
    that does nothing on the last rank."""
    import torch.distributed as dist

    collective_test.LARGE = 64 * 1024
    node = dataclasses.replace(world, host=f"node{world.rank // per_node}")
    if broken and world.rank == world.size - 1:
        real = getattr(dist, broken)
        setattr(dist, broken, lambda x, *args, **kwargs: real(x.clone(), *args, **kwargs))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        collective_test._test(parallel, node, load_hardware("h100"))
    return output.getvalue()


def test_every_group_and_both_kinds_of_links_are_measured() -> None:
    text, *others = run_ranks(body_test, 4, TP2_PP2, 2)
    assert others == ["", "", ""], "rank 0 speaks alone"
    assert text.startswith("4 ranks on 2 hosts (node0, node1), cpu; tp2 x pp2\n")
    rows = re.findall(r"^(\w+) +(\d(?: x \d)?) +(all-\S+|reduce-scatter) +[\d.]+ ms +[\d.]+ GB/s", text, re.M)
    kinds = [("world", "4"), ("tp", "2 x 2"), ("pp", "2 x 2")]
    assert rows == [(*kind, operation) for kind in kinds for operation in collective_test.OPERATIONS]
    assert re.search(r"^intra_node: \{bandwidth: \S+, latency: \S+\}$", text, re.M)
    assert re.search(r"^  inside a node: .* of the 370 of H100; .*slowest: ranks (0 1|2 3) on 1 host", text, re.M)
    between = r"^  between nodes: .* \d+% of the 45 of H100; .*slowest: ranks (0 2|1 3) on 2 hosts \(node0, node1\)$"
    assert re.search(between, text, re.M)


def test_groups_of_stages_that_differ() -> None:
    text = run_ranks(body_test, 4, ParallelConfig(stage_meshes="2x1,1x2"), 2)[0]
    assert text.startswith("4 ranks on 2 hosts (node0, node1), cpu; 2x1,1x2\n")
    rows = re.findall(r"^(\w+) +(\S+) +all-reduce +[\d.]+ ms", text, re.M)
    assert rows == [("world", "4"), ("tp", "2"), ("dp", "2")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--stage-meshes 2y1", "--stage-meshes=2y1: '2y1' is not TPxREPLICAS"),
        ("--stage-meshes 2x1,1x1 --tensor-model-parallel-size 2", "drop --tensor-model-parallel-size"),
    ],
)
def test_bad_meshes(flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout_of(collective_test.parse(flags.split()))
    assert said in str(caught.value)


def test_meshes_that_are_alike_are_two_sizes() -> None:
    layout = layout_of(collective_test.parse(["--stage-meshes", "2x2,2x2"]))
    assert (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size, layout.meshes) == (2, 2, ())


def test_groups_of_experts_and_nodes_of_different_sizes() -> None:
    parallel = ParallelConfig(experts=ExpertParallelism(expert_model_parallel_size=2))
    text = run_ranks(body_test, 4, parallel, 3)[0]
    assert re.findall(r"^(\w+) +\S.* all-to-all ", text, re.M) == ["world", "ep", "edp"]
    assert "slowest: ranks 0 3 on 2 hosts" in text
    alone = run_ranks(body_test, 2, ParallelConfig(), 1)[0]
    assert "inside a node: not measured, a node has one rank" in alone


@pytest.mark.parametrize(("broken", "operation"), [("all_reduce", "all-reduce"), ("all_to_all_single", "all-to-all")])
def test_a_wrong_result_is_named(broken: str, operation: str) -> None:
    account = rf"{operation} of world \(ranks 0 1 2 3 on 2 hosts \(node0, node1\)\) gave \S+ instead of \S+"
    run_ranks(body_test, 4, TP2_PP2, 2, broken, expect=account)


def test_as_a_command(tmp_path: Path) -> None:
    status, output = run_single(body_command, str(tmp_path), "python tools/collective_test.py --nprocs 2", timeout=120)
    assert status == 0 and "2 ranks on 1 host" in output and "between nodes: not measured, there is one node" in output
    for flags, line in (
        ("", "error: --nprocs=1: one rank has nobody to talk to; give --nprocs 2 or more, or start it by torchrun"),
        ("--nprocs 3 --tensor-model-parallel-size 2", "error: world size 3: not divisible by tp*pp=2"),
        ("--nprocs 2 --hardware no", "error: --hardware=no: no such hardware"),
        ("--nprcs 2", "error: unknown flag --nprcs; did you mean --nprocs?"),
    ):
        status, output = run_single(body_command, str(tmp_path), f"python tools/collective_test.py {flags}")
        assert status == 2 and output.startswith(line) and output.count("\n") == 1, output
