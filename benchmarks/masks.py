"""What attention launches on a GPU for every kind of mask, counted without one, at 8,192 tokens.

    python benchmarks/masks.py             # the table; about half a minute
    python benchmarks/masks.py --write     # ... into docs/gpus.md, and the budgets that a test holds

The core alone, from queries, keys and values to what the projection behind it reads, on the device of bookkeeping of
`megalite.rehearsal`: alone, and for one rank of two that share the sequence. Flex attention and what is compiled beside
it count as one launch for each result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks import gpu_page

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megalite.comm import ContextAxes

LENGTH, GROUPS, HEADS, CHANNELS, DOCUMENT, WINDOW, CAP, P = 8192, 8, 4, 128, 1000, 1024, 30.0, 0.1
KINDS = {
    "causal": "",
    "documents": "documents",
    "a window": "window",
    "documents, a window": "documents window",
    "a cap": "cap",
    "sinks": "sinks",
    "documents, a window, a cap, sinks": "documents window cap sinks",
    "dropout": "dropout",
    "all of them": "documents window cap sinks dropout",
}
PLACES = {"alone": (1, False), "ring": (2, False), "gathered": (2, True)}
"""Ranks that share a sequence, and whether they gather keys."""


class Launches(NamedTuple):
    """Of one attention; waits: of the host. once: beside them in the first layer of its kind in a micro-batch, which
    makes what the others share."""

    forward: int
    backward: int
    waits: int
    once: int


def count(kind: str, place: str) -> Launches:
    """Counts one kind."""
    import torch

    from benchmarks.layer_cost import counted
    from megalite.comm import ParallelMesh
    from megalite.rehearsal import DEVICE, FakeGroups, alone

    ranks, gathers = PLACES[place]
    with alone(FakeGroups(0, ranks)) as gpu:
        run, leaves = attention(kind, DEVICE, ParallelMesh.build(rank=0, size=ranks, cp=ranks).context(gathers=gathers))
        layers = []
        for _ in ("the first", "another"):
            with counted(gpu) as found:
                y = run()
                forward = found["launches"]
                torch.autograd.grad(y, leaves, torch.ones_like(y))
            layers.append(found["launches"])
        assert gpu.races == [], gpu.races
        return Launches(forward, layers[1] - forward, found["waits"], layers[0] - layers[1])


def attention(kind: str, device: torch.device | str, axes: ContextAxes) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A function that attends, on the first of the ranks that share a sequence, and what it has gradients for."""
    import torch

    from megalite.microbatch import Microbatch
    from megalite.nn import AttentionCore, context_attention, site_key
    from megalite.parallel.context import SequenceCut

    words, ranks = KINDS[kind].split(), axes.size
    core = AttentionCore(
        window=WINDOW if "window" in words else None,
        softcap=CAP if "cap" in words else None,
        dropout=P if "dropout" in words else 0.0,
        key=site_key(1, "attention").to(device),
        product_dtype=torch.bfloat16,
        axes=axes,
    )
    at = torch.arange(LENGTH)[None]
    starts = at // DOCUMENT * DOCUMENT if "documents" in words else None
    whole = Microbatch(at, at, at, torch.ones(1, LENGTH), torch.zeros(1, dtype=torch.int64), starts).to(device)
    batch = SequenceCut(0, ranks, ranks)(whole)
    shapes = ((GROUPS, HEADS, CHANNELS), (GROUPS, CHANNELS), (GROUPS, CHANNELS))
    q, k, v = (torch.randn(LENGTH // ranks, 1, *x).to(device, torch.bfloat16).requires_grad_() for x in shapes)
    sinks = torch.zeros(GROUPS * HEADS, device=device).requires_grad_() if "sinks" in words else None

    def run() -> Tensor:
        if ranks == 1:
            return core(q, k, v, sinks=sinks, training=True, **batch.of_attention)
        return context_attention(core, q, k, v, batch, sinks, training=True)

    return run, [q, k, v, *([] if sinks is None else [sinks])]


def counts() -> dict[str, dict[str, Launches]]:
    """Of every kind at every place."""
    return {kind: {place: count(kind, place) for place in PLACES} for kind in KINDS}


def table(found: dict[str, dict[str, Launches]]) -> str:
    """The lines of the page."""
    lines = ["| launches of attention, forward + backward | one rank | a ring of two | keys of two gathered |"]
    lines.append("| --- | --- | --- | --- |")
    for kind, places in found.items():
        cells = [f"{x.forward} + {x.backward}" + (f" ({x.once} once)" if x.once else "") for x in places.values()]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def held() -> dict[str, dict[str, Launches]]:
    """The budgets that were written."""
    read = gpu_page.held("masks")
    return {kind: {place: Launches(*numbers) for place, numbers in places.items()} for kind, places in read.items()}


def text(write: bool) -> str:
    """The table of what is counted now, which is kept where `write`."""
    found = counts()
    if write:
        gpu_page.keep("masks", found)
    return table(found)


def main(argv: Sequence[str]) -> int:
    """Prints or writes the table; the exit status."""
    return gpu_page.print_or_write("masks", __doc__, text, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
