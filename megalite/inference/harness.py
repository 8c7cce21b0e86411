"""megalite as a model of lm-evaluation-harness, so that its tasks run on a checkpoint without any conversion.

    lm_eval.simple_evaluate(model=harness_model(loaded), tasks=["lambada_openai"])     # or tools/evaluate_harness.py

`HarnessScorer` answers the three kinds of questions that the harness asks and needs no package; `harness_model` wraps
it into the harness's own base class, which is imported only then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megalite.errors import ConfigError
from megalite.extras import optional_package
from megalite.generation import Sampling
from megalite.inference.evaluation import TextWindows, score_source
from megalite.inference.generate import generate
from megalite.inference.loaded_model import LoadedModel
from megalite.inference.tasks import score_continuations


class HarnessScorer:
    """Log-likelihoods and continuations in the harness's terms.

    Args:
        loaded: model and tokenizer. An empty context is the end of another document, so one must have a token.
        micro_batch_size: pairs that are scored at once.
    """

    def __init__(self, loaded: LoadedModel, *, micro_batch_size: int = 16) -> None:
        self._loaded = loaded
        self._micro_batch_size = micro_batch_size

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both as they are in the whole text; spaces between them belong to the continuation."""
        encode, eod_id = self._loaded.tokenizer.encode, self._loaded.tokenizer.eod_id
        kept = context.rstrip()
        continuation, context = context[len(kept) :] + continuation, kept
        if not context:
            if eod_id is None:
                raise ConfigError("an empty context needs an end-of-document token, which this tokenizer lacks")
            return [eod_id], encode(continuation)
        ids = encode(context)
        return ids, encode(context + continuation)[len(ids) :]

    def loglikelihood(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[float, bool]]:
        """For each (context, continuation): log-likelihood in nats, and whether greedy decoding gives it."""
        encoded = [self.encode_pair(*pair) for pair in pairs]
        scores = score_continuations(self._loaded, encoded, micro_batch_size=self._micro_batch_size)
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, texts: Iterable[str]) -> list[float]:
        """For each text: log-likelihood of all of it, in windows without overlap; it follows an end of document."""
        eod_id, length = self._loaded.tokenizer.eod_id, self._loaded.config.model.seq_length
        prefix = [] if eod_id is None else [eod_id]
        results = []
        for text in texts:
            ids = np.array(prefix + self._loaded.tokenizer.encode(text), np.int64)
            windows = TextWindows(ids, seq_length=length, stride=length)
            results.append(-score_source(self._loaded, windows).loss_sum if len(ids) > 1 else 0.0)
        return results

    def generate_until(self, requests: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """For each (context, settings): the continuation up to the first of `until`, greedy unless `do_sample`.

        Those of equal settings are generated together.
        """
        asked = list(requests)
        texts: dict[int, str] = {}
        by_settings: dict[str, list[int]] = {}
        for place, (_, settings) in enumerate(asked):
            by_settings.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(place)
        for places in by_settings.values():
            found = self._generate([asked[place][0] for place in places], asked[places[0]][1])
            texts |= dict(zip(places, found, strict=True))
        return [texts[place] for place in range(len(asked))]

    def _generate(self, contexts: list[str], settings: Mapping[str, Any]) -> list[str]:
        tokenizer = self._loaded.tokenizer
        until = settings.get("until") or []
        stops: Sequence[str] = [until] if isinstance(until, str) else until
        sampling = Sampling(greedy=True)
        if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
            sampling = Sampling(
                temperature=float(settings.get("temperature", 1.0)),
                top_k=int(settings.get("top_k", 0)),
                top_p=float(settings.get("top_p", 1.0)),
            )

        def ended(ids: list[int]) -> bool:
            text = tokenizer.decode(ids)
            return any(stop in text for stop in stops)

        found = generate(
            self._loaded,
            [tokenizer.encode(context) or self.encode_pair("", "")[0] for context in contexts],
            sampling,
            max_new_tokens=int(settings.get("max_gen_toks", 256)),
            micro_batch_size=self._micro_batch_size,
            ended=ended,
        )
        texts = [tokenizer.decode(ids) for (ids,) in found]
        return [text[: min([text.find(stop) for stop in stops if stop in text], default=None)] for text in texts]


def harness_model(loaded: LoadedModel, *, micro_batch_size: int = 16) -> Any:
    """A `lm_eval.api.model.LM` around `loaded`.

    Raises:
        ConfigError: the package lm_eval is not installed.
    """
    base: Any = optional_package("lm-evaluation-harness", "lm_eval.api.model").LM
    scorer = HarnessScorer(loaded, micro_batch_size=micro_batch_size)

    class MegaliteLM(base):  # type: ignore[misc]  # a class of an optional package has no type
        """Takes the harness's requests apart and hands them to the scorer."""

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return scorer.loglikelihood(request.args for request in requests)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return scorer.loglikelihood_rolling(request.args[0] for request in requests)

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return scorer.generate_until(request.args for request in requests)

    return MegaliteLM()
