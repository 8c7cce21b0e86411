"""AdamW with a dtype for each moment.

With moments in the master's dtype a step of a group is one call of torch's fused kernel, for all of its tensors. With
16-bit moments (half the optimizer state) each step widens a piece of them, runs the kernel on it, and rounds them back;
Nesterov's direction, which the kernel has not, goes by pieces, too. The first moment loses nothing that matters. The
second does: a bf16 value (8 bits) does not change by less than 0.4 %, so with `beta2` = 0.999 its decay stalls. Keep
`--exp-avg-sq-dtype fp32` unless memory forces you to change it.
"""

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_kernel

from megalite.config import OptimizerConfig
from megalite.optim.rule import ParamGroup, UpdateRule, moment_like, pieces

MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = list[Tensor]


class AdamW(UpdateRule):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over flat tensors."""

    def __init__(self, groups: list[ParamGroup], settings: OptimizerConfig) -> None:
        super().__init__(groups, betas=(settings.args.adam_beta1, settings.args.adam_beta2), eps=settings.args.adam_eps)
        self.dtypes = (settings.exp_avg_dtype, settings.exp_avg_sq_dtype)
        # The kernel scales what it reads, by a number in fp32: no pass of its own. (On a CPU a scale of 1 needs none.)
        on_device = all(p.is_cuda and p.dtype == torch.float32 for group in groups for p in group["params"])
        self.divides = on_device and type(self) is AdamW and self.dtypes == ("fp32", "fp32")

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if not group.get("whole"):  # those are of a `MatrixRule`
                self.update([p for p in group["params"] if p.grad is not None], group)

    def update(self, tensors: list[Tensor], group: ParamGroup) -> None:
        """One step of tensors of a group, by one call of the kernel for all of them where nothing is rounded."""
        together = []
        for p in tensors:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state.update({name: moment_like(p, dtype) for name, dtype in zip(MOMENTS, self.dtypes, strict=True)})
            if not group.get("nesterov") and all(state[name].dtype == p.dtype for name in MOMENTS):
                together.append(p)
            else:
                self._step_in_pieces(p, group)
        if together:
            moments, squares, steps = ([self.state[p][name] for p in together] for name in (*MOMENTS, "step"))
            self.kernel(together, [p.grad for p in together if p.grad is not None], moments, squares, steps, group)

    def foresees(self, group: ParamGroup) -> bool:
        return True

    def expected_step(self, p: Tensor, piece: slice, group: ParamGroup, lr: float, weight_decay: float) -> Tensor:
        """The last step repeated, with the weight decay of the present `p`."""
        state = self.state[p]
        moment, square = (state[name].view(-1)[piece].to(p.dtype) for name in MOMENTS)
        # a tensor: the host would wait for the device to read a number; before the first step all moments are 0
        step = state["step"].double().clamp(min=1)
        beta1, beta2 = group["betas"]
        denominator = (square.sqrt() / (1 - beta2**step).sqrt()).add_(group["eps"])
        direction: Tensor = (moment / (1 - beta1**step)).div_(denominator)
        return direction.add_(p.view(-1)[piece], alpha=weight_decay).mul_(-lr)

    def _step_in_pieces(self, p: Tensor, group: ParamGroup) -> None:
        """One step of a tensor, so that what it needs beside a long one stays small."""
        state, flat = self.state[p], p.view(-1)
        assert p.grad is not None
        grads = p.grad.view(-1)
        for piece in pieces(p):
            stored = [state[name].view(-1)[piece] for name in MOMENTS]
            moments = [moment.to(p.dtype) for moment in stored]
            if group.get("nesterov"):
                self._nadamw(flat[piece], grads[piece], moments, state["step"], group)
            else:
                self.kernel([flat[piece]], [grads[piece]], moments[:1], moments[1:], [state["step"].clone()], group)
            for narrow, value in zip(stored, moments, strict=True):
                if narrow.dtype != value.dtype:
                    narrow.copy_(value)  # unchanged if the step is skipped
        self.count(state["step"])

    def _nadamw(self, p: Tensor, grad: Tensor, moments: Tensors, step: Tensor, group: ParamGroup) -> None:
        """NAdam (Dozat 2016) with constant beta1 and decoupled weight decay: the moment as the next step will have it,
        without the gradient of that step. step: number of steps before this one."""
        (beta1, beta2), (moment, square) = group["betas"], moments
        count = step.double() + 1
        self.write(moment, moment.mul(beta1).add_(grad, alpha=1 - beta1))
        self.write(square, square.mul(beta2).addcmul_(grad, grad, value=1 - beta2))
        direction = moment * (beta1 / (1 - beta1 ** (count + 1))) + grad * ((1 - beta1) / (1 - beta1**count))
        direction.div_((square.sqrt() / (1 - beta2**count).sqrt()).add_(group["eps"]))
        self.descend(p, direction, group)

    def kernel(
        self, tensors: Tensors, grads: Tensors, moments: Tensors, squares: Tensors, steps: Tensors, group: ParamGroup
    ) -> None:
        """torch's fused kernel. steps: of each tensor, before this one; it counts them."""
        adamw_kernel(
            tensors,
            grads,
            moments,
            squares,
            [],
            steps,
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
