"""The three questions of lm-evaluation-harness, answered by full recomputation for comparison."""

from __future__ import annotations

import math
import runpy
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.data.tokenizer import CharTokenizer
from megalite.errors import ConfigError
from megalite.inference.harness import HarnessScorer, harness_model
from megalite.inference.loaded_model import LoadedModel, load_for_inference
from tests.unit.inference.tiny_checkpoint import TEXT, all_logits, write_checkpoint

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def loaded(tmp_path: Path) -> tuple[LoadedModel, torch.nn.Module]:
    _, stack = write_checkpoint(tmp_path)
    return load_for_inference(tmp_path, device="cpu"), stack


def _likelihood(stack: torch.nn.Module, ids: list[int], count: int) -> float:
    log_probabilities = all_logits(stack, ids[:-1]).log_softmax(-1)  # type: ignore[arg-type]
    return math.fsum(float(log_probabilities[i, ids[i + 1]]) for i in range(len(ids) - 1 - count, len(ids) - 1))


def test_pairs(loaded: tuple) -> None:
    model, stack = loaded
    found = HarnessScorer(model).loglikelihood([("a b", " c"), ("a b ", "c"), ("", "xy")])
    expected = _likelihood(stack, list(b"a b c"), 2)
    assert [score for score, _ in found] == pytest.approx(
        [expected, expected, _likelihood(stack, [256, *b"xy"], 2)], rel=1e-12
    )


def test_whole_texts_begin_after_an_end_of_document(loaded: tuple) -> None:
    model, stack = loaded
    ids = [256, *TEXT.encode()]
    windows = [ids[start : start + 17] for start in range(0, len(ids) - 1, 16)]
    expected = math.fsum(_likelihood(stack, window, len(window) - 1) for window in windows)
    assert HarnessScorer(model).loglikelihood_rolling([TEXT, ""]) == [pytest.approx(expected, rel=1e-12), 0.0]


def test_generation_ends_before_a_stop(loaded: tuple) -> None:
    model, stack = loaded
    ids = list(b"Hi")
    for _ in range(10):
        ids.append(int(all_logits(stack, ids)[-1].argmax()))
    text = model.tokenizer.decode(ids[2:])
    stop = text[4:6]
    scorer = HarnessScorer(model)
    assert scorer.generate_until([("Hi", {"until": [], "max_gen_toks": 10})]) == [text]
    assert scorer.generate_until([("Hi", {"until": [stop], "max_gen_toks": 10})]) == [text[: text.find(stop)]]


def test_an_empty_context_needs_an_end_of_document(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tokenizer=CharTokenizer("".join(sorted(set(TEXT)))))
    scorer = HarnessScorer(load_for_inference(tmp_path, device="cpu"))
    with pytest.raises(ConfigError, match="needs an end-of-document token"):
        scorer.loglikelihood([("", "the")])


@dataclass
class Instance:
    args: tuple


def test_the_harness_sees_its_own_interface(loaded: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.ModuleType("lm_eval.api.model")
    stand_in.LM = type("LM", (), {})  # type: ignore[attr-defined]
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", stand_in)
    model = harness_model(loaded[0])
    assert isinstance(model, stand_in.LM)
    scorer = HarnessScorer(loaded[0])
    assert model.loglikelihood([Instance(("a", "b"))]) == scorer.loglikelihood([("a", "b")])
    assert model.loglikelihood_rolling([Instance(("some text",))]) == scorer.loglikelihood_rolling(["some text"])
    settings = {"until": [], "max_gen_toks": 3}
    assert model.generate_until([Instance(("a", settings))]) == scorer.generate_until([("a", settings)])


def test_without_the_package_the_message_says_what_to_install(loaded: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r'pip install .*\[eval\]"'):
        harness_model(loaded[0])


def test_an_unknown_task_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package that knows one task."""

    class Manager:
        def __init__(self, include_path: str | None) -> None: ...

        def match_tasks(self, names: list[str]) -> list[str]:
            return [name for name in names if name == "known"]

    def evaluate(**settings: Any) -> dict[str, Any]:
        return {"results": {task: {"acc": 0.5, "alias": "x"} for task in settings["tasks"]}}

    package, tasks = types.ModuleType("lm_eval"), types.ModuleType("lm_eval.tasks")
    package.simple_evaluate, tasks.TaskManager = evaluate, Manager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    tool = runpy.run_path(str(ROOT / "tools" / "evaluate_harness.py"))
    flags = tool["parse"](["--load", "x", "--tasks", "known"])
    assert tool["measure"](None, flags) == {"known": {"acc": 0.5}}
    flags.tasks = "known,other"
    with pytest.raises(ConfigError, match="--tasks=known,other: lm_eval knows no other; "):
        tool["measure"](None, flags)
