"""Dropout whose mask is a function of what is dropped, not of when.

An element is kept or not according to a hash of (seed, layer, site, sample, position, channel). No generator is
consumed, so the mask is the same at every tensor-, sequence-, data- or pipeline-parallel layout, for every size and
order of micro-batches, and when recomputed.

The hash is the finaliser of MurmurHash3 on 32-bit words held in int64 (torch has no unsigned arithmetic): each
multiplication is by a constant below 2**31, so that no product leaves int64.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.parallel.tensor import LayerContext

MASK = 0xFFFFFFFF


def site_key(seed: int, *names: int | str) -> Tensor:
    """A 31-bit word for one place of the model where dropout happens, int64 0-dim on the CPU.

    (A tensor: blocks that differ in nothing but a Python number would each be compiled anew.)
    """
    text = "/".join(str(part) for part in (seed, *names))
    return torch.tensor(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1)


def mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words (int64 tensors with values below 2**32) whose output bits all depend on all input
    bits.
    """
    word = (word ^ (word >> 16)) * 0x45D9F3B & MASK
    word = (word ^ (word >> 16)) * 0x45D9F3B & MASK
    return word ^ (word >> 16)


def combine(key: Tensor | int, value: Tensor) -> Tensor:
    """The key of `value` (non-negative int64) under `key`; shapes broadcast."""
    low, high = value & MASK, value >> 32
    return mix(mix((key ^ low) & MASK) + high * 0x1E3779B1 & MASK)


def token_keys(key: Tensor, sample_ids: Tensor, positions: Tensor) -> Tensor:
    """sample_ids `[b]`, positions in the sample `[s]` -> one word a token, `[s, b]`."""
    return combine(combine(key, sample_ids)[None, :], positions[:, None])


def keyed_dropout(x: Tensor, p: float, keys: Tensor, channels: Tensor) -> Tensor:
    """Zeroes elements of x with probability p and divides the others by 1 - p.

    keys: words that broadcast against x without its last dimension; channels: `[x.shape[-1]]`, the logical number of
    each channel.
    """
    keep = mix(keys[..., None] ^ _of_channels(channels)) >= int(p * 2**32)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def _of_channels(channels: Tensor) -> Tensor:
    return mix(channels + 0x2545F491 & MASK)


def narrowed(keys: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """What `keeps` takes of the same two: int32 with the same 32 bits, of which a kernel computes twice as many as of
    int64."""
    return keys.to(torch.int32), _of_channels(channels).to(torch.int32)


def least_word(p: float) -> int:
    """Of an element that is kept, as `keeps` compares them."""
    return int(p * 2**32) - (1 << 31)


def keeps(key: Tensor, channel: Tensor, least: int) -> Tensor:
    """Which elements `keyed_dropout` keeps, by their words of `narrowed`, which broadcast: elementwise, for a kernel
    that has no use for a mask in memory. least: `least_word` of the probability."""
    word = key ^ channel
    for _ in range(2):
        word = (word ^ ((word >> 16) & 0xFFFF)) * 0x45D9F3B  # modulo 2**32, as the wider product is masked
    word = word ^ ((word >> 16) & 0xFFFF)
    return (word ^ -(1 << 31)) >= least  # unsigned words compare as signed ones of half less


class HiddenDropout:
    """Dropout of one site of the residual stream, `[s, b, h]` or this rank's `[s/t, b, h]`. Costs nothing at p = 0."""

    def __init__(self, p: float, *, key: Tensor, part: int, first_channel: int = 0) -> None:
        """part: which piece of the sequence `x` is (the rank under sequence parallelism, else 0). first_channel: the
        logical number of its first channel."""
        self.p, self.key, self.part, self.first_channel = p, key, part, first_channel

    @classmethod
    def of(cls, config: ModelConfig, ctx: LayerContext, *site: int | str) -> HiddenDropout:
        """That of a site of a model on this rank."""
        part = ctx.tp.rank if ctx.sequence_split else 0
        first = 0 if ctx.grid is None else ctx.grid["features"](config.hidden_size).start
        return cls(config.hidden_dropout, key=site_key(ctx.seed, *site), part=part, first_channel=first)

    def __call__(self, x: Tensor, sample_ids: Tensor, places: Tensor | None = None, *, training: bool) -> Tensor:
        """places: int64, positions in the sample of the tokens of which x is a piece; None: 0, 1, 2 ..."""
        if self.p == 0.0 or not training:
            return x
        own = slice(self.part * x.shape[0], (self.part + 1) * x.shape[0])
        places = torch.arange(own.stop, device=x.device) if places is None else places
        keys = token_keys(self.key, sample_ids, places[own])
        channels = torch.arange(self.first_channel, self.first_channel + x.shape[-1], device=x.device)
        return keyed_dropout(x, self.p, keys, channels)
