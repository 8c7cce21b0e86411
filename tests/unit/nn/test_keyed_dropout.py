"""Dropout as a function of what is dropped: statistics, independence of layout and order, and none at p = 0."""

from __future__ import annotations

import torch

from megalite.config.model import ModelConfig
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn.dropout import HiddenDropout, keeps, keyed_dropout, least_word, mix, narrowed, site_key, token_keys
from megalite.nn.stack import LayerStack
from megalite.parallel.tensor.context import LayerContext


def batch(b: int = 4, s: int = 8) -> Microbatch:
    tokens = torch.randint(0, 40, (b, s + 1), generator=torch.Generator().manual_seed(0))
    return Microbatch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        positions=torch.arange(s).expand(b, s),
        loss_mask=torch.ones(b, s),
        sample_ids=torch.arange(100, 100 + b),
    )


def select(whole: Microbatch, rows: list[int]) -> Microbatch:
    """Some samples of a micro-batch, as one of their own."""
    return Microbatch(**{name: value[rows] for name, value in vars(whole).items() if isinstance(value, torch.Tensor)})


def model(seed: int = 3, **fields: object) -> LayerStack:
    config = ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=8,
        vocab_size=40,
        **fields,  # type: ignore[arg-type]
    )
    ctx = LayerContext(dtype=torch.float64, seed=seed)
    return build_stack(config, layer_specs(config), ctx, init_seed=1)


def test_the_hash_is_a_bijection_on_a_sample_of_words() -> None:
    words = torch.arange(1 << 20)
    hashed = mix(words)
    assert hashed.min() >= 0 and hashed.max() < 1 << 32
    assert len(hashed.unique()) == len(words)


def test_a_kernel_that_keeps_by_narrow_words_keeps_the_same() -> None:
    """The hash in 32 bits, by every word that its halves can do wrong with; a bound between neighbours."""
    keys = torch.cat((torch.tensor([0, 1, 1 << 31, (1 << 31) - 1, (1 << 32) - 1]), torch.randint(1 << 32, (2000,))))
    channels = torch.cat((torch.arange(300), torch.tensor([1 << 20])))
    words = mix(keys[:, None] ^ mix(channels + 0x2545F491 & 0xFFFFFFFF))
    near = sorted(words.flatten()[:50].tolist())
    for p in (0.0, 1e-9, 0.1, 0.5, 0.999, *((word + more) / 2**32 for word in near for more in (0, 1))):
        expected = keyed_dropout(torch.ones(len(keys), len(channels), dtype=torch.float64), p, keys, channels) != 0
        key, channel = narrowed(keys, channels)
        assert key.dtype == channel.dtype == torch.int32
        assert torch.equal(keeps(key[:, None], channel, least_word(p)), expected)


def test_rate_scale_and_independence_of_neighbours() -> None:
    s, b, h, p = 64, 8, 256, 0.3
    x = torch.ones(s, b, h, dtype=torch.float64)
    keys = token_keys(site_key(1, "here"), torch.arange(b), torch.arange(s))
    y = keyed_dropout(x, p, keys, torch.arange(h))
    assert set(y.unique().tolist()) == {0.0, 1.0 / (1.0 - p)}
    kept = (y > 0).double()
    assert abs(kept.mean() - (1 - p)) < 4 * (p * (1 - p) / y.numel()) ** 0.5
    for dim in range(3):  # neighbours along sequence, sample and channel are uncorrelated
        a, c = kept.narrow(dim, 0, kept.shape[dim] - 1), kept.narrow(dim, 1, kept.shape[dim] - 1)
        correlation = ((a - a.mean()) * (c - c.mean())).mean() / (p * (1 - p))
        assert abs(correlation) < 5 / a.numel() ** 0.5, dim
    per_channel = kept.mean((0, 1))
    assert (per_channel - (1 - p)).abs().max() < 5 * (p * (1 - p) / (s * b)) ** 0.5


def test_sites_seeds_and_samples_have_masks_of_their_own() -> None:
    x = torch.ones(8, 4, 64)
    ids = torch.arange(4)
    masks = [
        HiddenDropout(0.5, key=site_key(seed, "layers", layer, site), part=0)(x, ids, training=True)
        for seed in (1, 2)
        for layer in (0, 1)
        for site in ("after_attention", "after_mlp")
    ]
    masks.append(HiddenDropout(0.5, key=site_key(1, "layers", 0, "after_attention"), part=0)(x, ids + 4, training=True))
    for i, a in enumerate(masks):
        for c in masks[:i]:
            assert 0.4 < (a == c).double().mean() < 0.6


def test_sequence_parts_hold_their_part_of_the_mask() -> None:
    x = torch.ones(8, 2, 16)
    key, ids = site_key(1, "x"), torch.tensor([3, 9])
    whole = HiddenDropout(0.5, key=key, part=0)(x, ids, training=True)
    halves = [HiddenDropout(0.5, key=key, part=part)(x[:4], ids, training=True) for part in (0, 1)]
    assert torch.equal(torch.cat(halves), whole)


def test_losses_do_not_depend_on_how_samples_are_grouped_or_ordered() -> None:
    stack, whole = model(hidden_dropout=0.3, attention_dropout=0.3), batch()
    together = stack(None, whole)
    apart = stack(None, select(whole, [3, 1])) + stack(None, select(whole, [0])) + stack(None, select(whole, [2]))
    torch.testing.assert_close(apart, together, rtol=1e-13, atol=0)


def test_recomputation_replays_the_masks() -> None:
    plain = model(hidden_dropout=0.3, attention_dropout=0.3)
    plain(None, batch()).backward()
    choices = [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": (2,)},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": (1,)},
    ]
    for choice in choices:
        again = model(hidden_dropout=0.3, attention_dropout=0.3, **choice)
        again(None, batch()).backward()
        for a, c in zip(plain.parameters(), again.parameters(), strict=True):
            assert a.grad is not None and c.grad is not None and torch.equal(a.grad, c.grad)


def test_the_seed_changes_the_loss_and_evaluation_drops_nothing() -> None:
    assert model(seed=3, hidden_dropout=0.3)(None, batch()) != model(seed=4, hidden_dropout=0.3)(None, batch())
    assert model(attention_dropout=0.3)(None, batch()) != model()(None, batch())
    assert model(hidden_dropout=0.3, attention_dropout=0.3).eval()(None, batch()) == model().eval()(None, batch())


def test_no_dropout_returns_its_very_input() -> None:
    x = torch.ones(4, 2, 8)
    assert HiddenDropout(0.0, key=site_key(1), part=0)(x, torch.arange(2), training=True) is x
    assert HiddenDropout(0.5, key=site_key(1), part=0)(x, torch.arange(2), training=False) is x
