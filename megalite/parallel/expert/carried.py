"""Tokens that another library carries to the ranks of their experts and back (`--moe-token-dispatcher-type flex`).

    there   a token goes to each rank that has an expert of its choice, once, with its choices and weights
    here    as on one rank (`plan.py`): rows one expert after the other, products, each token's weighted sum
    back    the ranks' sums of a token are added up

Backward is the same way round: gradients of the sums go there, those of tokens and weights come back added up.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from megalite.comm import Axis, ExpertAxes, Handle, ParallelMesh
from megalite.config import Config
from megalite.parallel.expert.deep_ep import deep_ep_over
from megalite.parallel.expert.plan import Dispatched, Leg, Sent, plan_dispatch


class TokenLibrary(Protocol):
    """What such a library does. Each call is collective and starts a message: the tensors are valid once its handle has
    been waited for. n: tokens of this rank; r: those that come here, each once."""

    def dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor, Any, Handle]:
        """Tokens `[n, h]`, their choices `[n, k]` (int64, -1: none) and weights `[n, k]` -> `[r, h]`, `[r, k]` (this
        rank's experts from 0; -1: another rank's), `[r, k]`, and the trip, which is the way to go again. The shapes
        are known at once."""
        ...

    def dispatch_again(self, x: Tensor, trip: Any) -> Sent:
        """`[n, h]` -> `[r, h]`, the same way."""
        ...

    def combine(self, x: Tensor, trip: Any, weights: Tensor | None = None) -> Sent:
        """`[r, h]`, and perhaps `[r, k]`, the way back: each token's sums over the ranks, `[n, h]` and `[n, k]`."""
        ...


def expert_axes(mesh: ParallelMesh, config: Config | None = None) -> ExpertAxes:
    """The axes over which experts are cut and dealt out, and the library that carries tokens, if config names one.
    Collective at first use. Raises ConfigError: it cannot be imported."""
    etp, ep = mesh["etp"], mesh["ep"]
    if config is None or config.parallel.experts.moe_token_dispatcher_type != "flex":
        return ExpertAxes(etp, ep)
    return ExpertAxes(etp, ep, deep_ep_over(ep.group, ep.size, config.model.hidden_size))


class Carried:
    """Tokens on their way, and back again: as `Dispatched`, carried by `axes.library`.

    x: `[n, h]`. experts, kept, weights: `[n, k]`, of `num_experts`; kept: None: all. rows: stands for what travels in
    autograd's graph until it is waited for. counts: rows of this rank's experts, once it was.
    """

    def __init__(
        self, x: Tensor, experts: Tensor, kept: Tensor | None, weights: Tensor, num_experts: int, axes: ExpertAxes
    ) -> None:
        chosen = experts if kept is None else experts.masked_fill(~kept, -1)
        self._way, self._local = _Way(axes.library, chosen, num_experts), num_experts // axes.ep.size
        self._leg = Leg(self._way.there, self._way.back)
        self.rows, self._weights = self._leg.begin(x, weights)

    def wait(self) -> Tensor:
        """Rows of this rank's experts, one expert after the other."""
        rows, self._weights = self._leg.end(self.rows, self._weights)
        here = self._way.here
        self._here = Dispatched(rows, plan_dispatch(here, here >= 0, self._local, Axis.single("ep")))
        self.counts = self._here.counts
        return self._here.wait()

    def back(self, y: Tensor) -> Carried:
        """Starts the sums of each token's results here on their way back."""
        self._leg = Leg(self._way.back, self._way.gradients_there)
        (self.rows,) = self._leg.begin(self._here.back(y).combine(self._weights))
        return self

    def combine(self, _: Tensor) -> Tensor:
        """`[n, h]`, the ranks' sums added up. The weights have travelled with the tokens."""
        (arrived,) = self._leg.end(self.rows)
        return arrived


class _Way:
    """The messages of a micro-batch. It holds nothing of autograd's graph, which holds it."""

    here: Tensor
    trip: Any

    def __init__(self, library: TokenLibrary, chosen: Tensor, num_experts: int) -> None:
        self._library, self._chosen, self._number = library, chosen, num_experts

    def there(self, x: Tensor, weights: Tensor) -> Sent:
        rows, self.here, weights, self.trip, handle = self._library.dispatch(x, self._chosen, weights, self._number)
        return (rows, weights), handle

    def back(self, x: Tensor, *weights: Tensor) -> Sent:
        return self._library.combine(x, self.trip, *weights)

    def gradients_there(self, dy: Tensor) -> Sent:
        return self._library.dispatch_again(dy, self.trip)
