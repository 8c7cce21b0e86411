"""Keys and values of the tokens seen so far: what makes the next token cost one token."""

import torch
from torch import Tensor


class LayerCache:
    """One block's keys and values, `[max_length, b, g/t, d]` each, of which the first `length` rows are filled.
    max_length counts prompt and generated tokens together.

    Where ranks share a sequence each keeps its own tokens; `places` then says where in the sequence they are. A prefix
    comes first; of a text with padding in front it lies between the two, in the place of padding.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length, self.length = max_length, 0
        self.places: Tensor | None = None
        self.state: tuple[Tensor, Tensor] | None = None  # of linear attention: last inputs, state
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._prefix: tuple[Tensor, Tensor] | None = None

    def begin(self, keys: Tensor, values: Tensor) -> None:
        """With a prefix, `[P, b, g/t, d]`."""
        self._prefix = keys, values
        self.append(keys, values)

    def append(
        self, keys: Tensor, values: Tensor, places: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Adds `[n, b, g/t, d]` and returns all so far, `[length, b, g/t, d]`. places: int64 `[n]`. starts: int64
        `[b, n]`, the tokens in front of each text, which are padding. Raises ValueError where they do not fit.
        """
        end = self.length + keys.shape[0]
        if end > self.max_length:
            raise ValueError(f"key-value cache of {self.max_length} tokens: {end} do not fit")
        if self._keys is None or self._values is None:
            self._keys, self._values = keys.new_empty((0, *keys.shape[1:])), values.new_empty((0, *values.shape[1:]))
        if end > len(self._keys):  # twice as many each time: a long limit costs nothing before it is needed
            rows = min(self.max_length, max(end, 2 * len(self._keys)))
            self._keys, self._values = self._grown(self._keys, rows), self._grown(self._values, rows)
        self._keys[self.length : end] = keys
        self._values[self.length : end] = values
        self.length = end
        if self._prefix is not None and starts is not None:
            length, count = self._prefix[0].shape[:2]
            at = starts[:, -1] + torch.arange(length, device=keys.device)[:, None]  # [P, b]
            samples = torch.arange(count, device=keys.device)
            self._keys[at, samples], self._values[at, samples] = self._prefix
        if places is not None:
            self.places = places if self.places is None else torch.cat((self.places, places))
        return self._keys[:end], self._values[:end]

    def _grown(self, old: Tensor, rows: int) -> Tensor:
        new = old.new_empty((rows, *old.shape[1:]))
        new[: self.length] = old[: self.length]
        return new
