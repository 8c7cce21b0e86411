"""SOAP and Shampoo once more, of whole logical tensors, sharing nothing with `megalite.optim`; the table."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megalite.gradient import GradSink
from megalite.testing.rates import Rates
from megalite.testing.update_rules import SGD, Adafactor, AdamW, Lion, Muon, Named, Rule, is_blocks_matrix, matrices


class Soap(Rule):
    """Vyas et al., arXiv 2409.11321, algorithms 3 and 4, for every matrix of the blocks; AdamW for the rest.

    As by its authors, the first gradient makes the bases alone, and V is reordered with them; AdamW's weight decay.
    """

    magnified = 1e4  # eigenvectors turn by a rounding over the distance of two eigenvalues

    def takes(self, name: str, p: Tensor) -> bool:
        """Whether a parameter is not AdamW's."""
        return is_blocks_matrix(name, p) and ".router." not in name

    def start(self) -> None:
        self.leave_to_adamw(self.takes)
        self.of_matrix: dict[str, list[Named]] = {
            name: [{"M": torch.zeros_like(w), "V": torch.zeros_like(w)} for w in matrices(self.parameters[name])]
            for name in self.names
        }

    def step(self, gradients: Named, lr: Rates, weight_decay: float) -> None:
        self.rest.step(gradients, lr, weight_decay)
        for name in self.names:
            parts = zip(matrices(self.parameters[name]), matrices(gradients[name]), strict=True)
            for (w, g), state in zip(parts, self.of_matrix[name], strict=True):
                self.update_matrix(w, g, state, lr.rest, weight_decay)
        self.count += 1

    def update_matrix(self, w: Tensor, g: Tensor, state: Named, lr: float, weight_decay: float) -> None:
        args = self.settings.args
        b1, b2, t = args.soap_beta1, args.soap_beta2, self.count
        if t == 0:
            for side, square in (("L", g @ g.T), ("R", g.T @ g)):
                if len(square) <= args.soap_max_precond_dim:
                    state[side] = (1 - b2) * square
                    own = torch.eye(len(square), dtype=w.dtype)
                    state["Q" + side] = first_basis(state[side]) if g.any() else own
            return
        one = {"QL": torch.eye(len(w), dtype=w.dtype), "QR": torch.eye(w.shape[1], dtype=w.dtype)}
        left, right = (state.get(name, one[name]) for name in ("QL", "QR"))
        state["M"] = b1 * state["M"] + (1 - b1) * g
        state["V"] = b2 * state["V"] + (1 - b2) * (left.T @ g @ right) ** 2
        step = (left.T @ state["M"] @ right) / (state["V"].sqrt() + args.soap_eps)
        step *= math.sqrt(1 - b2**t) / (1 - b1**t)
        w -= lr * weight_decay * w + lr * (left @ step @ right.T)
        for side, square in (("L", g @ g.T), ("R", g.T @ g)):
            if side in state:
                state[side] = b2 * state[side] + (1 - b2) * square
                if t % args.soap_precondition_frequency == 0:
                    q = state["Q" + side]
                    sizes = torch.diag(q.T @ state[side] @ q)
                    by_size = sorted(range(len(q)), key=lambda i: -max(sizes[i], ROUNDING[sizes.dtype] * sizes.max()))
                    state["Q" + side], order = power_iteration(state[side], q, by_size)
                    state["V"] = state["V"][order] if side == "L" else state["V"][:, order]

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        yield from self.rest.moments()
        labels = {"M": "exp_avg", "V": "exp_avg_sq", "L": "left_preconditioner", "R": "right_preconditioner"}
        for name, parts in self.of_matrix.items():
            for key, label in (labels | {"QL": "left_basis", "QR": "right_basis"}).items():
                if key in parts[0]:
                    whole = torch.stack([state[key] for state in parts])
                    yield label, name, whole.view(*self.parameters[name].shape[:-2], *whole.shape[1:])


class Shampoo(Soap):
    """Gupta et al., arXiv 1802.09568, algorithm 1, with decayed means, the first moment in the gradient's place and
    Adam's length (arXiv 2002.09018); each matrix is written as `[blocks, blocks]` of its own preconditioners."""

    magnified = 10.0

    def takes(self, name: str, p: Tensor) -> bool:
        return is_blocks_matrix(name, p)

    def update_matrix(self, w: Tensor, g: Tensor, state: Named, lr: float, weight_decay: float) -> None:
        args, t = self.settings.args, self.count + 1
        b1, b2 = args.shampoo_beta1, args.shampoo_beta2
        state["M"] = b1 * state["M"] + (1 - b1) * g
        state["V"] = b2 * state["V"] + (1 - b2) * g**2
        for side, square in (("L", g @ g.T), ("R", g.T @ g)):
            n, most, zeros = len(square), args.shampoo_max_precond_dim, torch.zeros_like(square)
            own = torch.block_diag(*(torch.ones(min(most, n - i), min(most, n - i)) for i in range(0, n, most)))
            state[side] = b2 * state.get(side, zeros) + (1 - b2) * square * own.to(w.dtype)
            if self.count % args.shampoo_precondition_frequency == 0:
                state["Q" + side] = zeros.clone()
                for i in range(0, n, most):
                    block = state[side][i : i + most, i : i + most].double()
                    values, vectors = torch.linalg.eigh(block / max(torch.linalg.matrix_norm(block, 2), 1e-300))
                    by = (values.clamp(min=0) + args.shampoo_matrix_eps) ** -0.25
                    root = vectors @ torch.diag(by) @ vectors.T
                    state["Q" + side][i : i + most, i : i + most] = root.to(w.dtype)
        step = state["QL"] @ state["M"] @ state["QR"]
        adam = state["M"] / (1 - b1**t) / ((state["V"] / (1 - b2**t)).sqrt() + args.shampoo_eps)
        scale = float(adam.norm() / step.norm()) if g.any() or step.any() else 0.0
        w -= lr * weight_decay * w + lr * scale * step

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        for label, name, values in super().moments():
            if label.startswith(("left", "right")):
                values = packed(values, self.settings.args.shampoo_max_precond_dim)
            yield label.replace("basis", "root"), name, values


def packed(whole: Tensor, most: int) -> Tensor:
    """The diagonal blocks of `[..., n, n]` as `[..., n, most]`, each in its rows and the first columns."""
    n = whole.shape[-1]
    rows = [whole[..., i : i + most, i : i + most] for i in range(0, n, most)]
    return torch.cat([torch.nn.functional.pad(x, (0, min(most, n) - x.shape[-1])) for x in rows], -2)


class Noting(GradSink):
    """Keeps the operands of each sample's weight gradient."""

    __slots__ = ("noted",)

    def __init__(self, gradient: Tensor) -> None:
        super().__init__(gradient)
        self.noted: list[tuple[Tensor, Tensor]] = []

    def addmm(self, a: Tensor, b: Tensor) -> None:
        self.noted.append((a.double(), b.double()))
        super().addmm(a, b)


class Kfac(Rule):
    """Martens and Grosse, arXiv 1503.05671, with pi and damping of section 6.3, nu of each matrix; AdamW for the rest.

    chosen: a parameter's name -> the samples of a batch that its factors are of; None: all.
    """

    magnified = 1e3

    def start(self) -> None:
        self.leave_to_adamw(is_blocks_matrix)
        self.noted: dict[str, Noting] = {}
        self.scales: dict[str, dict[str, float]] = {}
        self.chosen: Callable[[str], list[int]] | None = None

    def sink(self, name: str, gradient: Tensor) -> GradSink:
        self.noted[name] = Noting(gradient)
        return self.noted[name]

    def step(self, gradients: Named, lr: Rates, weight_decay: float) -> None:
        self.rest.step(gradients, lr, weight_decay)
        self.count += 1
        for name in self.names:
            self.update(name, self.parameters[name], gradients[name], lr.rest, weight_decay)

    def update(self, name: str, p: Tensor, g: Tensor, lr: float, weight_decay: float) -> None:
        args, noted = self.settings.args, self.noted[name].noted
        tokens = sum(x.shape[0] for _, x in noted)
        noted = noted if self.chosen is None else [noted[i] for i in self.chosen(name)]
        x, dy = torch.cat([x for _, x in noted]), tokens * torch.cat([dy.T for dy, _ in noted])
        parts = dy.view(len(dy), -1, p.shape[-2]).unbind(1)
        now = {"A": x.T @ x / len(x), "G": torch.stack([d.T @ d / len(d) for d in parts])}
        state = self.state.setdefault(name, {"buffer": torch.zeros_like(p)})
        keep = min(1 - 1 / self.count, args.kfac_decay)
        for key, value in now.items():
            state[key] = (keep * state[key] + (1 - keep) * value if key in state else value).to(p.dtype)
        if (self.count - 1) % args.kfac_inverse_frequency == 0:
            a, g_ = state["A"].double(), state["G"].double()
            mean_g = sum(float(torch.trace(x)) for x in g_) / (len(g_) * g_.shape[-1])
            pi = math.sqrt(float(torch.trace(a)) / len(a) / mean_g)
            root = math.sqrt(args.kfac_damping)
            state["A-1"] = torch.inverse(a + pi * root * torch.eye(len(a), dtype=a.dtype)).to(p.dtype)
            inverses = [torch.inverse(x + root / pi * torch.eye(len(x), dtype=a.dtype)) for x in g_]
            state["G-1"] = torch.stack(inverses).to(p.dtype)
            self.scales[name] = {"A-1": pi * root, "G-1": root / pi}
        rate = lr * args.kfac_scale
        for w, dw, buffer, inverse in zip(*map(matrices, (p, g, state["buffer"])), state["G-1"], strict=True):
            step = inverse @ dw @ state["A-1"]
            step *= min(1.0, math.sqrt(args.kfac_kl_clip / max(float((rate**2 * step * dw).sum()), 1e-300)))
            buffer.copy_(args.kfac_momentum * buffer + step)
            w -= lr * weight_decay * w + rate * buffer

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        yield from self.rest.moments()
        labels = {"A": "inputs", "G": "outputs", "A-1": "inputs_inverse", "G-1": "outputs_inverse"}
        for name, state in self.state.items():
            yield "momentum_buffer", name, state["buffer"]
            for key, label in labels.items():
                value = state[key] * self.scales[name].get(key, 1.0)
                yield label, name, value[0] if key[0] == "G" and self.parameters[name].dim() == 2 else value


def power_iteration(square: Tensor, q: Tensor, order: list[int]) -> tuple[Tensor, list[int]]:
    """(Q of the images of q's columns in this order, the order). Columns whose images add nothing come last, as they
    were: whatever is orthogonal to the others."""
    least, found, rest = ROUNDING[q.dtype] * float(torch.diag(q.T @ square @ q).max()), list[Tensor](), list[int]()
    for i in order:
        x = beyond(square @ q[:, i], found)
        if x.norm() <= least:
            rest.append(i)
        else:
            found.append(beyond(x / x.norm(), found))
    for i in rest:
        x = beyond(q[:, i], found)
        found.append(beyond(x / x.norm(), found))
    return torch.stack([x / x.norm() for x in found], 1), [i for i in order if i not in rest] + rest


def beyond(x: Tensor, others: list[Tensor]) -> Tensor:
    """What is orthogonal to the others (Gram and Schmidt)."""
    for other in others:
        x = x - other * (other @ x)
    return x


ROUNDING = {torch.float32: 1e-7, torch.float64: 1e-9}
"""What may be nothing but rounding, as part of the largest eigenvalue."""


def first_basis(square: Tensor) -> Tensor:
    """Eigenvectors, in fp64 (in fp32 `eigh` loses some 1e-6 of the largest eigenvalue), and where eigenvalues are zero
    the part of fixed directions that is orthogonal to the others."""
    values, vectors = torch.linalg.eigh(square.double())
    n, rank = len(values), int((values > ROUNDING[square.dtype] * values.max()).sum())
    columns: Tensor = vectors.flip(1)[:, :rank]
    fixed = torch.randn(n, n, dtype=columns.dtype, generator=torch.Generator().manual_seed(0))[:, rank:]
    for x in fixed.T:
        for _ in range(2):  # Gram and Schmidt, twice for its rounding
            x = x - columns @ (columns.T @ x)
        columns = torch.cat([columns, (x / x.norm())[:, None]], 1)
    return columns.to(square.dtype)


RULES: dict[str, type[Rule]] = {
    "adam": AdamW,
    "sgd": SGD,
    "lion": Lion,
    "muon": Muon,
    "soap": Soap,
    "shampoo": Shampoo,
    "kfac": Kfac,
    "adafactor": Adafactor,
}
