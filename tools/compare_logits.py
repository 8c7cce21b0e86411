"""--verify of tools/convert_checkpoint.py: the logits of a model of ours beside those of transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from megalite.errors import RuntimeFailure
from megalite.strangers import load_causal_model

if TYPE_CHECKING:  # torch comes with what the functions import
    import torch

    from megalite.config import Config
    from megalite.convert import ModelSource

# A difference above this share of the largest logit is no rounding: both sides compute in fp32 or wider.
TOLERANCE = 1e-3
TOKENS = 64


def verify(
    ours: Path,
    theirs: Path,
    ckpt_step: int | None,
    written: torch.dtype | None,
    source: ModelSource,
    *,
    use_ema: bool = False,
    base: Path | None = None,
) -> None:
    """Compare the logits of random tokens, the weights of both sides rounded to the `written` dtype. Adapters are
    merged first, which may change no logit; only then are their weights rounded as they were written. base: where the
    model of adapters lies now.

    Raises RuntimeFailure where they differ by more than the rounding of sums.
    """
    import torch

    from megalite.convert import AdaptedSource, HuggingFaceSource
    from megalite.inference import load_for_inference
    from megalite.microbatch import Microbatch
    from megalite.nn import Head

    opened = partial(load_for_inference, ours, ckpt_step=ckpt_step, use_ema=use_ema, base=base, device="cpu")
    loaded = opened()
    model = loaded.config.model
    length = min(TOKENS, model.max_positions)
    tokens = torch.randint(0, model.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    microbatch = Microbatch(
        tokens=tokens,
        labels=tokens,
        positions=torch.arange(length)[None],
        loss_mask=torch.ones(1, length),
        sample_ids=torch.zeros(1, dtype=torch.int64),
    )

    def our_logits() -> torch.Tensor:
        head = cast(Head, loaded.model.get_submodule("head"))
        return head.logits(loaded.model.body(None, microbatch)).transpose(0, 1)

    with torch.no_grad():
        dtype = next(loaded.model.parameters()).dtype
        peer = load_causal_model(theirs, HuggingFaceSource(theirs).family.architecture, dtype, "--verify").eval()
        if isinstance(source, AdaptedSource):
            apart = our_logits()
            if model.lora.frozen_weights_int8:  # codes take no merged weights
                loaded = opened(changed=_without_int8)
            named = dict(loaded.model.logical_parameters())
            for name, parameter in named.items():
                parameter.copy_(source.merged(name)) if ".adapters." not in name else parameter.zero_()
            _compare("adapters merged and beside the base", our_logits(), apart)
            for name, parameter in named.items():
                parameter.copy_(source.read(name)) if ".adapters." not in name else None
            print(f"verify: rounding the merged weights changes logits by {(our_logits() - apart).abs().max():.3g}")
        for parameter in [*loaded.model.parameters(), *peer.parameters()] if written else []:
            parameter.copy_(parameter.to(written))
        _compare(f"{dtype}", our_logits(), peer(input_ids=tokens).logits)


def _without_int8(config: Config) -> Config:
    lora = replace(config.model.lora, frozen_weights_int8=False)
    return replace(config, model=replace(config.model, lora=lora))


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Prints how far logits are apart. Raises RuntimeFailure where that is no rounding of sums."""
    largest, difference = expected.abs().max().item(), (found - expected).abs().max().item()
    print(f"verify: largest difference of logits {difference:.3g}, largest logit {largest:.3g} ({what})")
    if not difference <= TOLERANCE * max(largest, 1.0):
        raise RuntimeFailure(f"--verify: logits differ by {difference:.3g} ({what}): the two models are not the same")
