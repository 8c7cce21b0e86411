"""Check 6: what each kernel takes, who waits for whom, and the step that comes of it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from source_tree import ROOT

from megalite.planner import CommGroup, Roofline, load_hardware
from megalite.rehearsal import rehearsed
from megalite.rehearsal.record import Call, Communicator
from megalite.rehearsal.timing import Prices, Work, settle
from tools import rehearse as tool

A100 = load_hardware("a100-80gb")
WIDE = (
    "--num-layers 2 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --micro-batch-size 1 --lr 1e-4 "
    "--global-batch-size 4 --bf16 --train-iters 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 "
    "--eval-iters 0 --pipeline-model-parallel-size 2 --zero-stage 1"
).split()


def test_kernels_and_messages_cost_what_the_plan_says() -> None:
    run = rehearsed(WIDE, 2)
    prices, roofline = Prices(run.config, A100), Roofline(A100)
    a, b = torch.empty(4, 64, 512, device="meta"), torch.empty(4, 512, 256, device="meta")
    seconds = roofline.product(run.config, 64, 256, 512, 4)
    assert prices.kernel(torch.ops.aten.bmm.default, (a, b), a @ b) == (pytest.approx(seconds), "products")
    q = torch.empty(2, 8, 128, 64, device="meta", dtype=torch.bfloat16)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    seconds = 2 * 2 * 2 * 8 * 128 * 128 * 64 / 2 / (312e12 * 0.55)  # two products, half of it masked
    assert prices.kernel(flash, (q, q, q, 0.0, True), flash(q, q, q, 0.0, True)) == (
        pytest.approx(seconds),
        "attention",
    )
    assert prices.kernel(torch.ops.aten.add.Tensor, (a, a), a) == (0.0, "")
    assert prices.moved(1000, over_link=True) == A100.host_transfer(500)

    members = Communicator((0, 8, 16, 24))
    call = Call("all_gather", members, 1 << 20, "bfloat16", "", None)  # type: ignore[arg-type]  # no line
    group = CommGroup(A100, 4, 8)
    assert prices.call(call) == group.gather(4 << 20)
    assert prices.call(replace(call, kind="all_reduce")) == group.all_reduce(1 << 20)
    assert prices.call(replace(call, kind="send", peer=8)) == CommGroup(A100, 2, 8).send(1 << 20)


def test_work_waits_for_its_stream_for_others_and_for_partners() -> None:
    def work(rank: int, seconds: float, *after: Work) -> Work:
        return Work(rank, 0, "kernels", seconds, "", "", list(after))

    first = work(0, 2.0)
    sends = work(0, 1.0, first)
    own = work(1, 0.5)
    takes = work(1, 1.0, own)
    behind = work(1, 3.0, takes)
    beside = work(1, 4.0, own)
    joined = work(1, 1.0, behind, beside)
    settle([first, sends, own, takes, behind, beside, joined], [[takes, sends]])
    assert [each.begin for each in (sends, takes, behind, beside, joined)] == [2.0, 2.0, 3.0, 0.5, 6.0]


def test_a_step_takes_what_the_plan_says_and_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, trace = tmp_path / "found.json", tmp_path / "trace.json"
    argv = [*WIDE, "--num-devices", "2", "--hardware", "a100-80gb", "--json", str(found), "--trace", str(trace)]
    assert tool.main(argv) == 0
    told = json.loads(found.read_text())
    assert told["faults"] == [] and told["ranks"] == [0, 1] and not told["fails"]
    mine, plan = map(float, re.findall(r"step of (\S+) s .* plan says (\S+)", told["rows"]["time"])[0])
    assert mine == pytest.approx(plan, rel=0.1)

    rows, pairs, begins = defaultdict(list), defaultdict(list), dict[str, float]()
    arrives: dict[str, float] = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            if event["name"] in ("send", "recv"):
                pairs[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
            if event["name"] == "recv":
                arrives[event["args"]["action"].partition(" from")[0]] = event["ts"] + event["dur"]
            if event["name"] == "native_layer_norm":
                begins.setdefault(event["args"]["action"], event["ts"])
    assert {rank for rank, _ in rows} == {0, 1} and len(rows) > 4
    for spans in rows.values():  # a stream does one thing at a time
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    forwards = {action.removeprefix("receive "): there for action, there in arrives.items() if "forward" in action}
    assert len(forwards) == 4 and all(begins[action] >= there - 1e-3 for action, there in forwards.items())
    assert len(pairs["send"]) == 8 == len(set(pairs["send"])) and sorted(pairs["send"]) == sorted(pairs["recv"])


def test_a_trace_needs_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "gpt2_124m.yaml")
    assert tool.main(["--config", config, "--num-devices", "8", "--trace", "x.json"]) == 2
    assert capsys.readouterr().err.startswith("error: --trace=x.json: --hardware says how long things take")


@pytest.mark.landing
def test_a_replayed_graph_takes_as_long_as_its_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """Not only as long as its memory takes: products and attention are most of it."""
    times = []
    for graphs in ("none", "local"):
        flags = f"--train-iters 5 --global-batch-size 8 --cuda-graph-impl {graphs} --num-devices 2 --hardware a100-80gb"
        assert tool.main([*WIDE, *flags.split()]) == 0
        times.append([float(x) for x in re.findall(r"step of (\S+) s .* plan says (\S+)", capsys.readouterr().out)[0]])
    (eager, plan), (replayed, same) = times
    assert replayed == pytest.approx(eager, rel=0.05) and same == pytest.approx(plan)
