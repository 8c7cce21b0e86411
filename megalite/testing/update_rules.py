"""Every update rule once more, of whole logical tensors, sharing nothing with `megalite.optim`.

torch.optim's AdamW, SGD and Muon, Lion and Adafactor from their papers. What the product names and
counts otherwise is said where it is converted.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megalite.config import OptimizerConfig
from megalite.gradient import GradSink
from megalite.testing.rates import Factors, Rates

NOISE = 1e-11
"""A number so much smaller than the largest of its tensor is what sums in another order leave of a zero."""

Named = dict[str, Tensor]


class Rule:
    """Steps `parameters` (masters by logical name, padding cut off), of which `decayed` have weight decay.

    unsettled: for rules that look at the sign of a number, however small it is: where one was rounding alone.
    magnified: how many times as much as AdamW the rule makes of a rounding.
    """

    magnified = 1.0

    def __init__(
        self,
        parameters: Named,
        decayed: frozenset[str],
        settings: OptimizerConfig,
        factors: Callable[[str], Factors] = lambda name: Factors(),
    ) -> None:
        self.parameters, self.decayed, self.settings, self.factors = parameters, decayed, settings, factors
        self.unsettled: Named = {}
        self.count = 0
        self.state: dict[str, Named] = {}
        self.start()

    def start(self) -> None:
        """Makes the state."""

    def sink(self, name: str, gradient: Tensor) -> GradSink:
        """What adds up a batch's gradient."""
        return GradSink(gradient)

    def leave_to_adamw(self, own: Callable[[str, Tensor], bool]) -> None:
        """Makes `rest`, AdamW for all parameters that are not the rule's own; these are `names`."""
        self.names = [n for n, p in self.parameters.items() if own(n, p)]
        rest = {n: p for n, p in self.parameters.items() if n not in self.names}
        self.rest = AdamW(rest, self.decayed, self.settings, self.factors)

    def step(self, gradients: Named, lr: Rates, weight_decay: float) -> None:
        self.count += 1
        for name, p in self.parameters.items():
            own, decay = self.factors(name), weight_decay if name in self.decayed else 0.0
            self.update(name, p, gradients[name], lr.of(name) * own.lr, decay * own.decay)

    def update(self, name: str, p: Tensor, g: Tensor, lr: float, weight_decay: float) -> None:
        raise NotImplementedError

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """(label, name, values) under the labels of a checkpoint."""
        for name, values in self.state.items():
            for label, value in values.items():
                yield label, name, value

    def note_noise(self, name: str, x: Tensor) -> None:
        noise = x.abs() <= NOISE * x.abs().max()
        self.unsettled[name] = self.unsettled.get(name, torch.zeros_like(noise)) | (noise & (x != 0))


class FromTorch(Rule):
    """Rules that torch.optim has: one optimizer a parameter, so that each has its own numbers."""

    def start(self) -> None:
        self.leaves = {name: nn.Parameter(p) for name, p in self.parameters.items()}  # shares memory
        self.optimizers = {name: self.make(name, leaf) for name, leaf in self.leaves.items()}

    def make(self, name: str, leaf: nn.Parameter) -> torch.optim.Optimizer:
        raise NotImplementedError

    def update(self, name: str, p: Tensor, g: Tensor, lr: float, weight_decay: float) -> None:
        optimizer, leaf = self.optimizers[name], self.leaves[name]
        optimizer.param_groups[0].update(lr=lr, weight_decay=weight_decay)
        leaf.grad = g
        optimizer.step()

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, optimizer in self.optimizers.items():
            for label, value in optimizer.state[self.leaves[name]].items():
                if label != "step":
                    yield label, name, value


class AdamW(FromTorch):
    """torch's. Moments that are kept in 16 bits are rounded after every step."""

    def make(self, name: str, leaf: nn.Parameter) -> torch.optim.Optimizer:
        args = self.settings.args
        betas = (args.adam_beta1, args.adam_beta2)
        return torch.optim.AdamW([leaf], betas=betas, eps=args.adam_eps * self.factors(name).eps, fused=True)

    def update(self, name: str, p: Tensor, g: Tensor, lr: float, weight_decay: float) -> None:
        super().update(name, p, g, lr, weight_decay)
        state = self.optimizers[name].state[self.leaves[name]]
        for label, dtype in zip(("exp_avg", "exp_avg_sq"), kept(self.settings), strict=True):
            state[label].copy_(state[label].to(dtype or p.dtype))


class SGD(FromTorch):
    """torch's, whose weight decay is a part of the gradient."""

    def make(self, name: str, leaf: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD([leaf], momentum=self.settings.args.sgd_momentum)


class Muon(FromTorch):
    """torch.optim.Muon for every matrix of the blocks, AdamW for the rest.

    torch orthogonalises in bf16; here it is Jordan's formula in full. torch's buffer is a mean (`lerp`), the product's
    a sum, `1 / (1 - momentum)` times as large; the orthogonal matrix is the same, if epsilon is scaled too.
    """

    def start(self) -> None:
        self.leave_to_adamw(is_blocks_matrix)
        self.momentum = self.settings.args.muon_momentum
        self.matrices = {name: matrices(self.parameters[name]) for name in self.names}
        self.leaves = {f"{n} {i}": nn.Parameter(x) for n, parts in self.matrices.items() for i, x in enumerate(parts)}
        self.optimizers = {name: self.make(name, leaf) for name, leaf in self.leaves.items()}

    def make(self, name: str, leaf: nn.Parameter) -> torch.optim.Optimizer:
        args = self.settings.args
        assert (args.muon_scale_mode, args.muon_extra_scale_factor) == ("spectral", 0.2), "what torch has under a name"
        eps = 1e-7 * (1 - self.momentum)
        return torch.optim.Muon([leaf], momentum=self.momentum, eps=eps, adjust_lr_fn="match_rms_adamw")

    def step(self, gradients: Named, lr: Rates, weight_decay: float) -> None:
        self.rest.step(gradients, lr, weight_decay)
        with orthogonal_in_full():
            for name in self.matrices:
                for i, g in enumerate(matrices(gradients[name])):
                    self.update(f"{name} {i}", self.leaves[f"{name} {i}"], g, lr.rest, weight_decay)

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        yield from self.rest.moments()
        for name, parts in self.matrices.items():
            leaves = [self.leaves[f"{name} {i}"] for i in range(len(parts))]
            buffers = [self.optimizers[f"{name} {i}"].state[x]["momentum_buffer"] for i, x in enumerate(leaves)]
            whole = torch.stack(buffers).view(self.parameters[name].shape)
            yield "momentum_buffer", name, whole / (1 - self.momentum)


class Lion(Rule):
    """Chen et al., arXiv 2302.06675, algorithm 2; the moment is rounded where it is kept in 16 bits."""

    def start(self) -> None:
        self.state = {name: {"exp_avg": torch.zeros_like(p)} for name, p in self.parameters.items()}

    def update(self, name: str, p: Tensor, g: Tensor, lr: float, weight_decay: float) -> None:
        m, args = self.state[name]["exp_avg"], self.settings.args
        c = args.lion_beta1 * m + (1 - args.lion_beta1) * g
        self.note_noise(name, c)
        p -= lr * (c.sign() + weight_decay * p)
        m.copy_((args.lion_beta2 * m + (1 - args.lion_beta2) * g).to(kept(self.settings)[0] or m.dtype))


class Adafactor(Rule):
    """Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5 without a first moment: decay 1 - t^-0.8, clipped at 1.

    The relative step of the paper with `adafactor_scale_parameter`; AdamW's weight decay, relative where the step is.
    """

    magnified = 10.0  # where AdamW has its eps, this has 1e-30: a small row is divided by no more than itself

    def update(self, name: str, p: Tensor, g: Tensor, lr: float, weight_decay: float) -> None:
        self.note_noise(name, g)
        if ".mlp.experts." not in name:
            self.update_one(name, p, g, self.state.setdefault(name, {}), lr, weight_decay)
            return
        states = self.of_expert.setdefault(name, [{} for _ in p])
        for each, gradient, state in zip(p, g, states, strict=True):
            self.update_one(name, each, gradient, state, lr, weight_decay)
        self.state[name] = {label: torch.stack([state[label] for state in states]) for label in states[0]}

    def start(self) -> None:
        self.of_expert: dict[str, list[Named]] = {}

    def update_one(self, name: str, p: Tensor, g: Tensor, state: Named, lr: float, weight_decay: float) -> None:
        decay = 1 - self.count**-0.8
        squared = g.square() + 1e-30
        if p.dim() < 2 or name not in self.decayed:  # a bias of two rows is no matrix
            means = {"exp_avg_sq": squared}
        else:
            means = {"exp_avg_sq_row": squared.mean(-1), "exp_avg_sq_col": squared.mean(-2)}
        for label, mean in means.items():
            state[label] = decay * state.get(label, torch.zeros_like(mean)) + (1 - decay) * mean
        if "exp_avg_sq" in state:
            estimate = state["exp_avg_sq"]
        else:
            # in fp32 the product of two rows of a gradient of zero, 1e-60, would be zero
            row, column = state["exp_avg_sq_row"].double(), state["exp_avg_sq_col"].double()
            estimate = row[..., :, None] * column[..., None, :] / row.mean(-1)[..., None, None]
        u = g / estimate.sqrt()
        u /= max(1.0, root_mean_square(u))
        relative = max(1e-3, root_mean_square(p)) if self.settings.args.adafactor_scale_parameter else 1.0
        p -= lr * relative * (weight_decay * p + u)


def kept(settings: OptimizerConfig) -> list[torch.dtype | None]:
    """How the first and the second moment are kept, None: as wide as the master."""
    names = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    return [names[settings.exp_avg_dtype], names[settings.exp_avg_sq_dtype]]


def root_mean_square(x: Tensor) -> float:
    return math.sqrt(float(x.square().mean()))


def is_blocks_matrix(name: str, p: Tensor) -> bool:
    return name.startswith("layers.") and name.endswith((".weight", ".lora_a", ".lora_b")) and p.dim() >= 2


def matrices(x: Tensor) -> list[Tensor]:
    """[rows, columns], or the layers of [..., rows, columns] (a gated projection is two matrices)."""
    return list(x.reshape(-1, *x.shape[-2:]))


@contextmanager
def orthogonal_in_full() -> Iterator[None]:
    """torch.optim.Muon without its bf16: kellerjordan.github.io/posts/muon, `newtonschulz5`."""

    def newton_schulz(g: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
        a, b, c = coefficients
        x: Tensor = g / (g.square().sum().sqrt() + eps)  # a sum that does not lose digits with length, as norm() does
        if g.shape[0] > g.shape[1]:
            x = x.T
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        return x.T if g.shape[0] > g.shape[1] else x

    with patch("torch.optim._muon._zeropower_via_newtonschulz", newton_schulz):
        yield
