"""Texts from a loaded model, at whatever layout it was loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megalite.errors import CheckpointError
from megalite.generation import OnTokens, Request, Sampling
from megalite.inference.loaded_model import LoadedModel


def generate(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    micro_batch_size: int = 1,
    ended: Callable[[list[int]], bool] = lambda new: False,
    on_tokens: OnTokens = lambda request, tokens: None,
) -> list[list[list[int]]]:
    """The ids that follow each prompt: `[prompt][sample][ids]`, on every rank. Collective: all ranks give the same.

    prompts: of at least one id each; of one longer than the model's positions only the end is seen. When a text has
        become longer, it continues from the newer half of what fits.
    max_new_tokens: a sample ends then, or before one of `loaded.stops`.
    num_samples: of each prompt; sample j is drawn with the seed + j.
    micro_batch_size: sequences that go through the model together.
    ended: whether a continuation is complete; asked now and then, so it may have become a little longer.
    on_tokens: told of new ids as they come, on the ranks of the replica that generates them.
    Which ids follow depends on the weights, the prompt and its number, the seed, and nothing else (in fp64; in a
    narrower precision two logits may be so close that layouts round them to different orders).
    Raises CheckpointError where the model's logits are not numbers.
    """
    assert all(prompts), "a model continues a text, so there is at least one token"
    requests = [
        Request(number, tuple(prompt), sample) for number, prompt in enumerate(prompts) for sample in range(num_samples)
    ]
    found = loaded.generator.run(
        requests,
        sampling,
        max_new_tokens=max_new_tokens,
        stops=loaded.stops,
        micro_batch_size=micro_batch_size,
        ended=ended,
        on_tokens=on_tokens,
    )
    new = [ids for ids in found if ids is not None]
    if len(new) < len(found):
        raise CheckpointError("`load`: the model's logits are not numbers (its training diverged?); load an older one")
    return [new[first : first + num_samples] for first in range(0, len(new), num_samples)]
