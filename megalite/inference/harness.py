"""megalite as a model of lm-evaluation-harness, so that its tasks run on a checkpoint without any conversion.

    lm_eval.simple_evaluate(model=harness_model(loaded), tasks=["lambada_openai"])     # or tools/evaluate_harness.py

`HarnessScorer` answers the three kinds of questions that the harness asks and needs no package; `harness_model` wraps
it into the harness's own base class, which is imported only then. `TaskEvaluator` asks a run's tasks on the way.
"""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from megalite.comm import patiently
from megalite.errors import ConfigError
from megalite.extras import optional_package
from megalite.generation import Sampling
from megalite.inference.evaluation import TextWindows, score_source
from megalite.inference.loaded_model import LoadedModel, generate
from megalite.inference.tasks import score_continuations
from megalite.observe import Record
from megalite.train import ModelInUse

TOKENS_AT_ONCE = 8192


class HarnessScorer:
    """Log-likelihoods and continuations in the harness's terms. micro_batch_size: pairs that are scored at once.

    An empty context is the end of another document, so the tokenizer of `loaded` must have a token for that.
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
        return [*score_continuations(self._loaded, encoded, micro_batch_size=self._micro_batch_size)]

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
    """A `lm_eval.api.model.LM` around `loaded`. Raises ConfigError where the package lm_eval is not installed."""
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


class TaskEvaluator:
    """`--eval-tasks`: measures the model of a run by the tasks of its files. Made and called by all ranks, which answer
    the same questions together. The harness draws from seeds of its own: the training's bits do not change.

    Raises ConfigError where the package is missing, or a file holds no task that the harness can make.
    """

    def __init__(self, use: ModelInUse) -> None:
        self._use, self._settings, mesh = use, use.state.config.logging.eval_tasks, use.mesh
        files = self._settings.eval_task_files
        optional_package(f"`eval_task_files`={' '.join(files)}", "lm_eval")
        mesh.over("dp", "pp")  # communicators are made with the run
        self._names = {name_of(path): path for path in files}
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        with redirect_stderr(StringIO()):  # bars of its data are not the run's
            first = patiently(self._made if mesh.world.is_first else None, mesh.world)  # it fills the caches
            self._tasks = patiently(self._made if first is None else None, mesh.world) or first

    def _made(self) -> dict[str, Any]:
        """The harness's tasks by name."""
        tasks: Any = optional_package("`eval_task_files`", "lm_eval.tasks")
        folders = sorted({str(Path(path).resolve().parent) for path in self._names.values()})
        manager, made = tasks.TaskManager(include_path=folders, include_defaults=False), dict[str, Any]()
        for name, path in self._names.items():
            try:
                made |= tasks.get_task_dict([name], manager)
            except Exception as error:
                what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise ConfigError(f"`eval_task_files`={path}: lm_eval cannot make this task ({what})") from None
        return made

    def __call__(self, iteration: int) -> list[Record]:
        """A `"task"` record for each task: its name and its measures. Collective."""
        use, state, config = self._use, self._use.state, self._use.state.config
        engine = config, state.tokenizer, use.mesh, use.channel, state.model.placement, use.parts()
        place = Path(config.checkpoint.save or ".")
        loaded = LoadedModel(*engine, place, iteration, consumed_samples=0, origin=state.origin)
        size = max(config.training.micro_batch_size, TOKENS_AT_ONCE // config.model.seq_length)
        evaluate: Any = optional_package("`eval_task_files`", "lm_eval.evaluator").evaluate
        model, limit = harness_model(loaded, micro_batch_size=size), self._settings.eval_tasks_limit
        with use.whole_weights(), redirect_stderr(StringIO()):  # its bars are not the run's
            results = measures_of(evaluate(model, self._tasks, limit=limit, bootstrap_iters=0, log_samples=False))
        return [{"kind": "task", "iteration": iteration, "task": task, **results[task]} for task in sorted(results)]


def name_of(path: str) -> str:
    """The name of the task in a file of the harness. Raises ConfigError."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^task:[ \t]*[\"']?([^\s\"'#]+)", text, re.M)
    if found is None:
        raise ConfigError(f"`eval_task_files`={path}: has no line 'task: NAME'; give task files of lm_eval")
    return found[1]


def measures_of(found: Any) -> dict[str, dict[str, float]]:
    """Task -> measure -> value, of the harness's results. An unfiltered measure has its name alone: `acc`, not
    `acc,none`."""
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in measures.items()
            if isinstance(value, int | float) and name != "sample_len"
        }
        for task, measures in found["results"].items()
    }
