"""Update rules against their formulas."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.comm import Axis
from megalite.config import Rates as Own
from megalite.config.optimizer import OptimizerArgs, OptimizerConfig
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.errors import ConfigError
from megalite.inventory import BufferParameter, ParameterPlacement
from megalite.observe.live_memory import LiveBytes
from megalite.optim import CORRECTIONS, OPTIMIZERS, Delay
from megalite.optim.adafactor import cut_dimension
from megalite.optim.muon import orthogonalise
from megalite.testing.preconditioned import RULES
from megalite.testing.rates import Rates


def run(name: str, steps: int, settings: OptimizerConfig, *, matrix: bool = False, **group: Any) -> tuple[Tensor, Any]:
    """Trains one tensor on gradients drawn from a fixed seed; (its values, the optimizer)."""
    generator = torch.Generator().manual_seed(1)
    shape = (6, 4) if matrix else (24,)
    p = torch.randn(shape, generator=generator, dtype=torch.float64).float()
    places = [ParameterPlacement(shape, (0,) * len(shape))] if matrix else []
    rule = OPTIMIZERS[name]([{"params": [p], "decay": True, "whole": matrix, "placements": places}], settings)
    for _ in range(steps):
        rule.param_groups[0].update(lr=0.1, weight_decay=0.01, **group)
        p.grad = torch.randn(shape, generator=generator, dtype=torch.float64).float()
        rule.step()
    return p, rule


def gradients(steps: int, shape: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(shape, generator=generator, dtype=torch.float64).float() for _ in range(steps + 1)]
    return draws[0], draws[1:]


def test_bf16_moments_halve_the_state_and_stay_close() -> None:
    exact, full = run("adam", 20, OptimizerConfig(lr=1.0))
    mixed = OptimizerConfig(lr=1.0, exp_avg_dtype="bf16")
    close, half = run("adam", 20, mixed)
    state = half.state[half.param_groups[0]["params"][0]]
    assert state["exp_avg"].dtype == torch.bfloat16 and state["exp_avg_sq"].dtype == torch.float32
    assert not torch.equal(exact, close)
    assert float((exact - close).abs().max()) < 0.01 * float((exact - gradients(0, (24,))[0]).abs().max())


def test_widened_pieces_are_the_fused_kernel_when_nothing_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from megalite.optim import adamw

    generator = torch.Generator().manual_seed(3)
    start = torch.randn(24, generator=generator)
    pieces, whole = start.clone(), start.clone()
    options: Any = dict(betas=(0.9, 0.99), eps=1e-8)
    mine = adamw.AdamW([{"params": [pieces]}], OptimizerConfig(lr=1.0, args=OptimizerArgs(adam_beta2=0.99)))
    mine.param_groups[0].update(lr=0.1, weight_decay=0.3)
    theirs = torch.optim.AdamW([whole], lr=0.1, weight_decay=0.3, fused=True, **options)
    for step in range(5):
        if step == 3:  # the same numbers in another layout of the arithmetic: piece by piece
            state = mine.state[pieces]
            monkeypatch.setattr("megalite.optim.rule.STEP_PIECE", 8)
            state["exp_avg"] = state["exp_avg"].double()
        pieces.grad = torch.randn(24, generator=generator)
        whole.grad = pieces.grad.clone()
        mine.step()
        theirs.step()
    assert torch.equal(pieces, whole)


def test_lion_follows_the_paper() -> None:
    settings = OptimizerConfig(lr=1.0, args=OptimizerArgs(lion_beta1=0.9, lion_beta2=0.99))
    got, _ = run("lion", 3, settings)
    p, draws = gradients(3, (24,))
    m = torch.zeros(24)
    for g in draws:
        p = p - 0.1 * (torch.sign(0.9 * m + 0.1 * g) + 0.01 * p)
        m = 0.99 * m + 0.01 * g
    assert torch.allclose(got, p, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (2, 6, 9)])
def test_orthogonalise_brings_singular_values_to_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before, after = torch.linalg.svd(x, full_matrices=False), orthogonalise(x, 5)
    values = torch.linalg.svdvals(after)
    assert float(values.min()) > 0.3 and float(values.max()) < 1.3
    inside = before.U.mT @ after @ before.Vh.mT  # diagonal: the singular directions are kept
    assert float((inside - torch.diag_embed(torch.diagonal(inside, dim1=-2, dim2=-1))).abs().max()) < 1e-9


def test_muon_moves_matrices_orthogonally_and_the_rest_as_adamw() -> None:
    settings = OptimizerConfig(lr=1.0, args=OptimizerArgs(muon_momentum=0.9, muon_extra_scale_factor=0.2))
    got, _ = run("muon", 3, settings, matrix=True)
    p, draws = gradients(3, (6, 4))
    m = torch.zeros(6, 4)
    for g in draws:
        m = 0.9 * m + g
        p = p - 0.1 * (0.2 * 6**0.5 * orthogonalise(g + 0.9 * m, 5) + 0.01 * p)
    assert torch.allclose(got, p, atol=1e-6)
    flat, _ = run("muon", 3, settings)
    assert torch.equal(flat, run("adam", 3, settings)[0])


@pytest.mark.parametrize("max_dim", [0, 4, 10000])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (2, 5, 5)])
def test_soap_is_the_papers(shape: tuple[int, ...], max_dim: int) -> None:
    """Against algorithm 3 written again, over bases that change four times; each of a gated projection's two matrices
    has its own."""
    generator, name = torch.Generator().manual_seed(1), "layers.0.fc1.weight"
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    args = OptimizerArgs(soap_precondition_frequency=2, soap_max_precond_dim=max_dim, soap_beta1=0.9)
    config, theirs, mine = OptimizerConfig(lr=0.1, optimizer="soap", args=args), start.clone(), start.clone()
    paper = RULES["soap"]({name: theirs}, frozenset({name}), config)
    placements = [ParameterPlacement(shape, (0,) * len(shape))]
    rule = OPTIMIZERS["soap"]([{"params": [mine], "decay": True, "whole": True, "placements": placements}], config)
    rule.param_groups[0].update(lr=0.1, weight_decay=0.01)
    for step in range(10):
        g = torch.randn(shape, generator=generator, dtype=torch.float64)
        mine.grad = g.clone()
        rule.step()
        paper.step({name: g}, Rates(0.1, 0.1), 0.01)
        assert torch.equal(mine, start) == (step == 0)  # the first gradient makes the bases
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-9), step


@pytest.mark.parametrize(("rank", "frequency"), [(2, 1), (7, 1), (3, 4)])
def test_soap_does_not_follow_rounding(rank: int, frequency: int) -> None:
    """Gradients of few tokens: what they leave out of a basis is not decided by the last digit."""
    args = OptimizerArgs(soap_precondition_frequency=frequency, soap_eps=1e-5)
    settings = OptimizerConfig(lr=1.0, args=args)

    def train(noise: float) -> torch.Tensor:
        generator, rounding = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
        p, placement = torch.zeros(12, 8, dtype=torch.float64), ParameterPlacement((12, 8), (0, 0))
        rule = OPTIMIZERS["soap"]([{"params": [p], "decay": True, "whole": True, "placements": [placement]}], settings)
        rule.param_groups[0].update(lr=0.1, weight_decay=0.01)
        for _ in range(9):
            left, right = (torch.randn(n, rank, generator=generator, dtype=torch.float64) for n in p.shape)
            g = left @ right.T
            p.grad = g * (1 + noise * torch.randn(g.shape, generator=rounding, dtype=torch.float64))
            rule.step()
        return p

    assert torch.allclose(train(0.0), train(1e-15), rtol=0, atol=1e-7)


def test_soap_with_no_basis_is_adam_one_step_late() -> None:
    settings = OptimizerConfig(lr=1.0, args=OptimizerArgs(soap_max_precond_dim=0, soap_beta1=0.9, soap_beta2=0.999))
    got, _ = run("soap", 4, settings, matrix=True)
    p, draws = gradients(4, (6, 4))
    m, v = torch.zeros(6, 4), torch.zeros(6, 4)
    for t, g in enumerate(draws[1:], 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        update = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        p = p - 0.1 * (update + 0.01 * p)
    assert torch.allclose(got, p, atol=1e-5)


@pytest.mark.parametrize("correction", ["predict", "error-feedback"])
def test_the_last_step_is_kept_without_a_copy_of_the_masters(correction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.optim.rule.STEP_PIECE", 1000)
    p = torch.randn(64_000)
    settings = OptimizerConfig(lr=1.0, args=OptimizerArgs(sgd_momentum=0.0))
    rule = OPTIMIZERS["sgd"]([{"params": [p], "decay": True, "whole": False}], settings)
    rule.param_groups[0].update(lr=0.1, weight_decay=0.01)
    corrected = CORRECTIONS[correction](rule, Delay(1, of_gradient=1, of_weights=1, learning_rate=0.1), (1.0, 1.0))

    def step_of(rule: Any) -> int:
        p.grad = torch.randn(64_000)
        with LiveBytes() as counter:
            counter.add_everything()
            start = counter.now
            rule.step()
        return counter.peak - start

    step_of(corrected)  # allocates the state
    before, alone = p.clone(), step_of(rule)
    assert step_of(corrected) - alone < 64_000 * 4 / 8
    p.copy_(before)
    corrected.found_inf = torch.ones(())
    step = corrected.state[p]["last_step"].clone()
    step_of(corrected)
    assert torch.equal(p, before) and torch.equal(corrected.state[p]["last_step"], step)


def test_weights_are_foreseen_with_the_rate_of_their_group() -> None:
    own, rest = torch.ones(8), torch.ones(8)
    groups = [{"params": [p], "decay": False, "whole": False, "rates": Own(p is own)} for p in (own, rest)]
    rule = OPTIMIZERS["sgd"](groups, OptimizerConfig(lr=1.0))
    delay = Delay(1, of_gradient=1, of_weights=1, learning_rate=0.1, decoupled_lr=0.5)
    corrected = CORRECTIONS["predict"](rule, delay, (1.0, 1.0))
    for group in rule.param_groups:
        group["lr"] = 0.0
        group["params"][0].grad = torch.ones(8)
    corrected.step()
    for p, lr in ((own, 0.5), (rest, 0.1)):
        corrected.write_compute_weights(p, foreseen := torch.empty(8))
        assert torch.allclose(foreseen, 1 - lr * torch.ones(8))


def test_sgd_is_torch_sgd() -> None:
    got, _ = run("sgd", 4, OptimizerConfig(lr=1.0, args=OptimizerArgs(sgd_momentum=0.8)))
    p, draws = gradients(4, (24,))
    theirs = torch.optim.SGD([p], lr=0.1, momentum=0.8, weight_decay=0.01)
    for g in draws:
        p.grad = g
        theirs.step()
    assert torch.equal(got, p)


def test_no_rule_of_the_table_imports_the_compiler() -> None:
    """torch.optim.Optimizer does: 70 MB and most of a second on every rank."""
    code = (
        "import sys, torch\n"
        "from megalite.config import OptimizerConfig\n"
        "from megalite.optim import OPTIMIZERS\n"
        "p = torch.zeros(4); p.grad = torch.ones(4)\n"
        "for row in ('adam', 'sgd', 'lion', 'muon', 'soap', 'shampoo'):\n"
        "    OPTIMIZERS[row]([{'params': [p], 'decay': True, 'whole': False}], OptimizerConfig(lr=1.0)).step()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])


def test_apex_is_asked_for_by_name_and_missing() -> None:
    assert "apex" not in sys.modules, "a test has left a stand-in behind"
    if importlib.util.find_spec("apex") is not None:
        pytest.skip("apex is installed")
    with pytest.raises(ConfigError, match="--optimizer-impl=apex"):
        run("adam", 1, OptimizerConfig(lr=1.0, optimizer_impl="apex"))


@pytest.mark.parametrize("name", ["muon", "soap", "shampoo"])
def test_matrices_of_blocks_are_whole_and_biases_of_two_rows_are_not(name: str) -> None:
    whole = OPTIMIZER_SPECS[name].whole
    assert whole is not None
    assert whole("layers.0.mlp.fc1.weight", 3) and whole("layers.11.attention.qkv.weight", 2)
    assert not whole("layers.0.mlp.fc1.bias", 2) and not whole("embedding.word_embeddings.weight", 2)


def test_the_table_without_torch_says_what_is_kept() -> None:
    """Numbers as large as the parameter in a rule's state, for a flat slice and for a whole matrix."""
    assert set(OPTIMIZER_SPECS) == set(OPTIMIZERS)
    settings = OptimizerConfig(lr=0.1)
    for name, rule in OPTIMIZER_SPECS.items():
        if rule.statistics or rule.taps:  # counted in tests/unit/planner/test_model_states.py
            continue
        for matrix in (False, True) if rule.whole is not None else (False,):
            p, optimizer = run(name, 1, OptimizerConfig(lr=1.0), matrix=matrix)
            kept = [t for t in optimizer.state[p].values() if isinstance(t, Tensor) and t.shape == p.shape]
            assert len(kept) == (rule.most_moments(settings) if matrix else len(rule.moments(settings))), (name, matrix)


def authors_soap(start: Tensor, gradients: list[Tensor], config: OptimizerConfig, lr: float, decay: float) -> Tensor:
    """Algorithm 3 of arXiv 2409.11321 with one power iteration and QR, as it is written there: nothing in it knows of
    small eigenvalues."""
    args, w = config.args, start.clone()
    b1, b2 = args.soap_beta1, args.soap_beta2
    rows, columns = w.shape
    left, right = torch.zeros(rows, rows, dtype=w.dtype), torch.zeros(columns, columns, dtype=w.dtype)
    mean, square = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(gradients):
        if t == 0:
            left, right = (1 - b2) * g @ g.T, (1 - b2) * g.T @ g
            q_left, q_right = (torch.linalg.eigh(side)[1].flip(1) for side in (left, right))
            continue
        mean = b1 * mean + (1 - b1) * g
        square = b2 * square + (1 - b2) * (q_left.T @ g @ q_right) ** 2
        turned = (q_left.T @ mean @ q_right) / (square.sqrt() + args.soap_eps)
        size = (1 - b2**t) ** 0.5 / (1 - b1**t)
        w = w - lr * (size * q_left @ turned @ q_right.T + decay * w)
        left, right = b2 * left + (1 - b2) * g @ g.T, b2 * right + (1 - b2) * g.T @ g
        if t % args.soap_precondition_frequency == 0:
            order = torch.diag(q_left.T @ left @ q_left).argsort(descending=True)
            q_left, square = torch.linalg.qr(left @ q_left[:, order])[0], square[order]
            order = torch.diag(q_right.T @ right @ q_right).argsort(descending=True)
            q_right, square = torch.linalg.qr(right @ q_right[:, order])[0], square[:, order]
    return w


@pytest.mark.parametrize("frequency", [1, 3])
@pytest.mark.parametrize("least", [1e-2, 1e-6, 1e-8, 1e-9])
def test_soap_is_its_authors_below_1e_7_of_the_largest_eigenvalue(least: float, frequency: int) -> None:
    """least: the smallest eigenvalue of L and R, of their largest. An eigenvector is known to rounding over that."""
    n, generator = 12, torch.Generator().manual_seed(5)

    def draw() -> Tensor:
        return torch.randn(n, n, generator=generator, dtype=torch.float64)

    (u, _), start = torch.linalg.qr(draw()), draw()
    spectrum = torch.logspace(0, math.log10(least) / 2, n, dtype=torch.float64)
    gradients = [u @ (spectrum[:, None] * draw()) for _ in range(12)]
    args = OptimizerArgs(soap_precondition_frequency=frequency)
    config, mine = OptimizerConfig(lr=0.1, optimizer="soap", args=args), start.clone()
    group = {"params": [mine], "decay": True, "whole": True, "placements": [ParameterPlacement((n, n), (0, 0))]}
    rule = OPTIMIZERS["soap"]([group], config)
    rule.param_groups[0].update(lr=0.1, weight_decay=0.01)
    for g in gradients:
        mine.grad = g.clone()
        rule.step()
    side = rule.sides[mine][0].preconditioner
    values = torch.linalg.eigvalsh(side)
    assert float(values[0] / values[-1]) < 2 * least
    theirs = authors_soap(start, gradients, config, 0.1, 0.01)
    assert torch.allclose(mine, theirs, rtol=0, atol=1e-14 / least), float((mine - theirs).abs().max())


def test_soap_makes_little_of_a_rounding_whatever_the_spectrum() -> None:
    """Gradients of fewer tokens than rows, their singular values spread over all digits: twenty draws."""
    rows, columns, tokens = 32, 16, 12
    settings = OptimizerConfig(lr=0.1, args=OptimizerArgs(soap_precondition_frequency=1, soap_eps=1e-4))
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        sizes = torch.logspace(0, -7, tokens, dtype=torch.float64)
        gradients = [draw(rows, tokens) @ (sizes[:, None] * draw(tokens, columns)) for _ in range(4)]
        start, found = draw(rows, columns), []
        for rounding in (0.0, 1e-15):
            p = start.clone()
            placements = [ParameterPlacement((rows, columns), (0, 0))]
            rule = OPTIMIZERS["soap"](
                [{"params": [p], "decay": True, "whole": True, "placements": placements}], settings
            )
            rule.param_groups[0].update(lr=0.1, weight_decay=0.0)
            for g in gradients:
                p.grad = g + rounding * g.abs().max() * draw(rows, columns)
                rule.step()
            found.append((p, *(side.basis.abs() for side in rule.sides[p])))
        weights, *bases = (float((a - b).abs().max()) for a, b in zip(*found, strict=True))
        assert weights < 1e-5 and max(bases) < 1e-3, f"draw {seed}: weights {weights:.2g}, bases {max(bases):.2g}"


@pytest.mark.parametrize(
    ("shape", "whole", "sharded", "family", "cut"),
    [
        ((32, 8), (61, 8), {"tp"}, "dense", 0),
        ((64, 8), (64, 8), {"tp"}, "dense", 0),  # 64 words, padded to 128
        ((8, 16), (8, 32), {"tp"}, "dense", 1),
        ((8,), (8,), set(), "dense", None),
        ((2, 4, 16), (4, 8, 16), {"ep", "tp"}, "expert", 1),
        ((2, 8, 16), (4, 8, 16), {"ep"}, "expert", None),
    ],
)
def test_adafactor_knows_what_is_cut(
    shape: tuple[int, ...], whole: tuple[int, ...], sharded: set[str], family: str, cut: int | None
) -> None:
    place = ParameterPlacement(whole, (0,) * len(whole), frozenset(sharded), family=family)
    parameter = BufferParameter(0, "weight", shape, place)
    assert cut_dimension(parameter, Axis("tp", 2, 0, (0, 1))) == cut
    assert cut_dimension(parameter, Axis.single("tp")) is None
