"""Check 6: when what each rank has launched would run, by the planner's costs of kernels and messages.

A piece of work begins when those before it on its stream, and those that its stream or the host has waited for, are
over (`order.py` says which); a collective when its partners on the rehearsed ranks are ready, too. From what the
actions of one rank take, the simulator makes the step of the whole batch, which is compared with the plan's.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from megalite.config import Config
from megalite.inventory import given_plan
from megalite.planner import CommGroup, Hardware, Roofline, predict, program_of, steady_state
from megalite.rehearsal.classes import mesh_of
from megalite.rehearsal.match import Node, Records, matched, progress
from megalite.rehearsal.memory import NUMBER, planned_actions
from megalite.rehearsal.rank import Rehearsed
from megalite.rehearsal.record import Call, RankRecord
from megalite.schedule import Costs

APART = 0.05


class Prices:
    """Seconds of kernels and messages on some hardware."""

    def __init__(self, config: Config, hardware: Hardware) -> None:
        self.hardware = hardware
        self._config, self._roofline = config, Roofline(hardware)
        self._flops = hardware.matrix_flops[config.training.precision.name] * hardware.attention_efficiency

    def kernel(self, function: Any, args: Sequence[Any], out: Any) -> tuple[float, str]:
        """(Seconds, what kind of work) of a product or an attention; (0, '') of what only moves bytes."""
        count = flop_registry.get(getattr(function, "_overloadpacket", None))
        if count is None:
            return 0.0, ""
        flops, packet = count(*(x for x in args if not isinstance(x, torch.dtype)), out_val=out), str(function)
        if "varlen" in packet:  # as if each sample were one document: of its lengths only the device knows
            flops = 4 * args[0].numel() * self._config.model.seq_length * (2.5 if "backward" in packet else 1)
        if "attn" in packet or "attention" in packet:
            return flops / 2 / self._flops, "attention"  # half of it is masked
        first = out[0] if isinstance(out, (tuple, list)) else out
        m, n = first.shape[-2:]
        products = first.numel() / (m * n)
        return self._roofline.product(self._config, m, n, flops / 2 / first.numel(), products), "products"

    def moved(self, nbytes: int, *, over_link: bool) -> float:
        """Of a kernel that reads and writes so many bytes; over_link: from host memory, or to it."""
        return self.hardware.host_transfer(nbytes / 2) if over_link else self._roofline.traffic(nbytes, 1)

    def call(self, call: Call) -> float:
        """Of a collective or a message between ranks that lie as its own do."""
        first, *others = call.communicator.ranks
        size, stride = 1 + len(others), others[0] - first if others else 1
        group = CommGroup(self.hardware, size, stride)
        if call.peer is not None:
            return replace(group, size=2).send(call.nbytes)
        if call.kind == "all_to_all":
            return group.all_to_all(call.nbytes * (sum(call.sent) or 1) * (size - 1) / size)
        if call.kind in ("all_gather", "reduce_scatter"):
            return group.gather(call.nbytes * size)
        return group.all_reduce(call.nbytes) if call.kind == "all_reduce" else group.gather(call.nbytes)


@dataclass(eq=False, slots=True)
class Work:
    """Of the last iteration. after: what it waits for. call: its number, of a collective or a message."""

    rank: int
    line: int
    kind: str
    seconds: float
    text: str
    action: str
    after: list[Work]
    call: int | None = None
    begin: float = 0.0

    @property
    def end(self) -> float:
        return self.begin + self.seconds


def works(run: Rehearsed, record: RankRecord, prices: Prices) -> list[Work]:
    """What a rank launches in its last iteration, in the host's order."""
    found: list[Work] = []
    at: dict[tuple[int, int], Work] = {}
    last: dict[int, Work] = {}
    behind, inside, action = list[Work](), False, ""
    for kind, number, amount, line, text in record.log:
        if kind == "phase":
            inside = text == f"iteration {run.steps}"
        elif kind == "action":
            action = text
        elif kind == "behind" and (line, number) in at:
            behind.append(at[line, number])
        elif kind == "work" and inside:
            what, _, text = text.partition(" ")
            after = [*behind, *([last[line]] if line in last else [])]
            last[line] = at[line, number] = Work(record.rank, line, what, amount * 1e-9, text, action, after)
            found.append(last[line])
        elif kind == "call" and inside:
            found[-1].call, found[-1].kind = number, "messages"
            found[-1].seconds = prices.call(record.calls[number])
        behind = behind if kind == "behind" else []
    return found


def settle(all_works: Sequence[Work], groups: Sequence[Sequence[Work]] = ()) -> None:
    """Sets when each begins. groups: calls that begin together."""
    partners = {work: group for group in groups for work in group}
    for work, over in progress({work: work.after for work in all_works}, partners):
        work.begin = max((before.end for before in work.after), default=0.0)
        begin = max((each.begin for each in over), default=0.0)
        for each in over:
            each.begin = begin


def together(run: Rehearsed, records: Records, prices: Prices) -> list[Work]:
    """The last iteration of the rehearsed ranks, who wait for each other."""
    by_rank = {rank: works(run, record, prices) for rank, record in records.items()}
    calls: dict[Node, Work] = {(w.rank, w.call): w for each in by_rank.values() for w in each if w.call is not None}
    groups = [[calls[node] for node in group if node in calls] for group in matched(records)]
    found = [work for each in by_rank.values() for work in each]
    settle(found, [group for group in groups if len(group) > 1])
    return found


def step_rows(run: Rehearsed, records: Records, hardware: Hardware) -> Iterator[tuple[str, str]]:
    """What the report says of time; nothing where not every stage was rehearsed."""
    prices, config = Prices(run.config, hardware), run.full
    program = program_of(config, run.size, plan := given_plan(config))
    costs: dict[tuple[int, str], float] = {}
    shares, after, hop = defaultdict[str, float](float), 0.0, 0.0
    for rank, record in records.items():
        place = mesh_of(run, rank).coordinate("pp")
        known = {NUMBER.sub("", action.words): action for action in planned_actions(program, place)}
        own = works(run, record, prices)
        for work in own:
            if work.call is not None and record.calls[work.call].peer is not None:
                hop, work.seconds = max(hop, work.seconds), 0.0  # the simulator sends
        settle(own)
        rest = 0.0
        for words, each in _taken(own).items():
            action = known.get(words)
            if action is not None and action.is_compute:
                at = action.stage, action.kind
                costs[at] = max(costs.get(at, 0.0), median(each) + hardware.action_overhead)
            else:
                rest += sum(each)
        after = max(after, rest)
        for work in own if rank == 0 else ():
            shares[work.kind] += work.seconds
    if {stage for stage, _ in costs} != set(range(program.num_stages)):
        return
    pipeline = steady_state(config, program, Costs(communication=hop, exact=costs), plan).makespan
    plan_s = predict(config, run.size, hardware, Roofline(hardware))
    planned, batch = plan_s.step_time - plan_s.breakdown["overhead"], plan_s.breakdown["pipeline"]
    mine = pipeline + after
    yield "time", f"a step of {mine:.3g} s by its kernels on {hardware.name}, the plan says {planned:.3g}"
    if abs(mine - planned) > APART * planned:
        told = ", ".join(f"{what} {seconds:.3g} s" for what, seconds in shares.items())
        terms = f"micro-batches {pipeline:.3g} s of {batch:.3g}, update {after:.3g} of {planned - batch:.3g}"
        yield "  of it", f"{terms}; what rank 0 launches in a rehearsed iteration: {told}"


def _taken(own: Sequence[Work]) -> dict[str, list[float]]:
    """Words of an action without its micro-batch -> seconds by which each of it moves the end of the first stream."""
    seconds, reached = defaultdict[str, float](float), 0.0
    for work in (work for work in own if work.line == 0):
        seconds[work.action] += work.end - reached
        reached = work.end
    found: dict[str, list[float]] = defaultdict(list)
    for words, each in seconds.items():
        found[NUMBER.sub("", words)].append(each)
    return found


def write_trace(path: Path, run: Rehearsed, records: Records, hardware: Hardware) -> None:
    """A Chrome trace of the last iteration: a process a rank, a row a stream."""
    events: list[dict[str, Any]] = []
    for rank, record in records.items():
        names = [("process_name", 0, f"rank {rank}"), *(("thread_name", *each) for each in enumerate(record.lines))]
        events += [{"ph": "M", "name": a, "pid": rank, "tid": n, "args": {"name": name}} for a, n, name in names]
    for work in together(run, records, Prices(run.config, hardware)):
        call = {} if work.call is None else {"call": str(records[work.rank].calls[work.call])}
        name, _, place = work.text.partition(" at ")
        events.append({
            "ph": "X", "name": name, "cat": work.kind, "pid": work.rank, "tid": work.line, "ts": work.begin * 1e6,
            "dur": work.seconds * 1e6, "args": {"action": work.action, "line": place, **call},
        })  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
