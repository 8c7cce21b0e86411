"""Keys and values of the tokens generated so far: what makes the next token cost one token."""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """One block's keys and values, `[max_length, b, g/t, d]` each, of which the first `length` rows are filled."""

    def __init__(self, max_length: int) -> None:
        self.max_length, self.length = max_length, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds `[n, b, g/t, d]` and returns all so far, `[length, b, g/t, d]`. Raises ValueError where they do not
        fit.
        """
        end = self.length + keys.shape[0]
        if end > self.max_length:
            raise ValueError(f"key-value cache of {self.max_length} tokens: {end} do not fit")
        if self._keys is None or self._values is None:
            self._keys, self._values = keys.new_empty(0), values.new_empty(0)
        if end > len(self._keys):  # twice as many each time: a long limit costs nothing before it is needed
            rows = min(self.max_length, max(end, 2 * len(self._keys)))
            self._keys, self._values = self._grown(self._keys, keys, rows), self._grown(self._values, values, rows)
        self._keys[self.length : end] = keys
        self._values[self.length : end] = values
        self.length = end
        return self._keys[:end], self._values[:end]

    def _grown(self, old: Tensor, like: Tensor, rows: int) -> Tensor:
        new = torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)
        new[: self.length] = old[: self.length].view(-1, *like.shape[1:])
        return new


class KeyValueCache:
    """One `LayerCache` a block; `max_length` counts prompt and generated tokens together."""

    def __init__(self, num_layers: int, max_length: int) -> None:
        self.layers = [LayerCache(max_length) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self.layers[0].length if self.layers else 0
