"""What looks at a `Pipeline`: its layers on a rank, spans of a profiler, a timeline; times of layers, cuts by them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import megalite
from megalite.comm import World
from megalite.errors import ConfigError
from megalite.testing import run_ranks, run_single

LAYERS, SAMPLES, WIDTH = 4, 2, 8


class Slow(nn.Module):
    """Sleeps in forward; its statistics, its draws and its input change as it runs."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.drop(self.norm(self.linear(x.mul_(1.0))))


def made(balance: object, mesh: megalite.ParallelMesh) -> megalite.Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(LAYERS)]
    x = torch.empty(SAMPLES, WIDTH, dtype=torch.float64, device="meta")
    return megalite.Pipeline(layers, loss=nn.functional.mse_loss, example=x, mesh=mesh, balance=balance)


def body_looked_at(world: World, path: str) -> dict[str, object]:
    mesh = megalite.ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
    batch = [(torch.ones(SAMPLES, WIDTH).double() * n, torch.zeros(SAMPLES, WIDTH).double()) for n in range(3)]
    plain, pipe = made("operations", mesh), made([1.0 + 4.0 * world.rank, 1.0, 1.0, 1.0], mesh)
    losses = [plain.step(batch).item()]
    pipe.trace(path)
    losses.append(pipe.step(batch).item())
    written = Path(path).stat().st_mtime_ns if world.is_first else 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        losses.append(pipe.step(batch).item())
    losses.append(pipe.step(batch).item())
    after = Path(path).stat().st_mtime_ns if world.is_first else 0
    return {
        "losses": losses,
        "layers": [number for number, _ in pipe.layers()],
        "one stage": [number for number, _ in pipe.layers((world.rank, 0))],
        "spans": sorted(event.key for event in profiler.key_averages() if event.key.startswith(("forward", "back"))),
        "once": written == after,
    }


def test_a_pipeline_shows_its_layers_its_actions_and_its_timeline(tmp_path: Path) -> None:
    """Cut by numbers of each layer, of which the largest of the ranks count: 5 | 1 1 1, else 1 1 | 1 1 of as many
    operations. The loss is the same."""
    found = run_ranks(body_looked_at, 2, str(tmp_path / "timeline.txt"))
    assert [each["layers"] for each in found] == [[0], [1, 2, 3]] == [each["one stage"] for each in found]
    for rank, each in enumerate(found):
        assert each["once"] and len(set(each["losses"])) == 1
        assert each["spans"] == [f"{kind} s{rank} mb{n}" for kind in ("backward", "forward") for n in (3, 4, 5)]
    text = (tmp_path / "timeline.txt").read_text()
    assert text.count("rank ") == 2 and {"F", "f", "B", "b"} <= set(text), text


def body_timed(world: World) -> None:
    layers, x = [nn.Embedding(5, WIDTH), Slow(0.004), nn.Flatten(), Slow(0.0)], torch.zeros(SAMPLES, dtype=torch.int64)
    before = {name: tensor.clone() for name, tensor in nn.ModuleList(layers).state_dict().items()}
    state = torch.get_rng_state()
    for example in x, x.to("meta"):
        times = megalite.time_layers(layers, example, repeats=2)
        assert [one.name for one in times] == [f"layers[{n}] {type(layer).__name__}" for n, layer in enumerate(layers)]
        assert times[1].forward >= 0.004 and all(0 < one.backward < one.seconds for one in times if "Slow" in one.name)
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in nn.ModuleList(layers).parameters())
    assert all(torch.equal(before[name], now) for name, now in nn.ModuleList(layers).state_dict().items())


def test_layers_are_timed_and_stay_as_they_are() -> None:
    run_single(body_timed)


@pytest.mark.parametrize(
    ("balance", "text"),
    [
        ("time", "balance='time': 'operations', 'parameters', or a number for each layer"),
        ([1.0], "balance: 1 numbers; one from 0 on for each of the 4 layers is wanted"),
        ([1.0, -1.0, 1.0, 1.0], "balance: 4 numbers; one from 0 on"),
        ([0.0] * 4, "balance: 4 numbers; one from 0 on"),
    ],
)
def test_what_layers_weigh_is_checked(balance: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("[", r"\[")):
        made(balance, megalite.ParallelMesh.single())
    with pytest.raises(ConfigError, match="trace: timeline.gif: unknown form; end the name in .html, .json, .svg or"):
        made("parameters", megalite.ParallelMesh.single()).trace("timeline.gif")
    with pytest.raises(ConfigError, match="repeats=0: a number above 0 is wanted"):
        megalite.time_layers([nn.Identity()], torch.zeros(1), repeats=0)


def test_schedules_are_printed_by_name() -> None:
    assert "'1f1b': Schedule('1f1b')" in str(megalite.SCHEDULES) and "lambda" not in str(megalite.SCHEDULES)
