"""`--data-schedule`: every phase is the data set it would be alone, and what has begun may not be edited."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megalite.data.blend import PhasedDataset
from megalite.data.build import Datasets, build_datasets
from megalite.data.survey import Phase, phase_differences, surveys_to_meta
from megalite.data.tokenizer import NullTokenizer
from megalite.errors import DataError
from tests.unit.data.data_inputs import config, tokens_of, write_documents

WEB, CODE = range(0, 100), range(100, 200)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Corpora of 60 documents with tokens of their own, and lists that name them."""
    for name, ids in (("web", WEB), ("code", CODE)):
        write_documents(tmp_path / name, [[ids[(7 * d + t) % 100] for t in range(9)] for d in range(60)])
    lists = {"web": "{0}/web", "code": "{0}/code", "both": "0.75 {0}/web 0.25 {0}/code", "sizes": "{0}/web {0}/code"}
    for name, words in lists.items():
        (tmp_path / f"{name}.txt").write_text(words.format(tmp_path))
    return tmp_path


def build(files: Path, steps: str | None, samples: int, *, seed: int = 3, **more: object) -> Datasets:
    """Sequences of 8 tokens, all of the data. steps: without folder and ending."""
    given = {"split": "1", **{key: more.pop(key) for key in ("data_args_path", "split") if key in more}}
    if steps is not None:
        pairs = [pair.split(":") for pair in steps.split()]
        given["data_schedule"] = " ".join(f"{tokens}:{files}/{name}.txt" for tokens, name in pairs)
    return build_datasets(
        config(**given), seq_length=8, train_samples=samples, valid_samples=0, test_samples=0, seed=seed,
        tokenizer=NullTokenizer(300), cache_dir=files / "cache", **more,
    )  # fmt: skip


def to_meta(phases: tuple[Phase, ...]) -> list[dict]:
    """As a checkpoint's JSON."""
    return json.loads(json.dumps([asdict(phase) for phase in phases]))


def alone(files: Path, name: str, samples: int, number: int) -> list[list[int]]:
    """The samples of a run that reads one list only, with the seed of the phase of this number."""
    path = str(files / f"{name}.txt")
    train = build(files, None, samples, seed=3 + PhasedDataset.SEED_STEP * number, data_args_path=path).train
    return [tokens_of(train, sample) for sample in range(samples)]


def test_phases_are_the_data_sets_one_after_the_other(files: Path) -> None:
    """100 samples: web to token 321 (the 41st sample reaches it), both to 480, web by size with code to the end."""
    train = build(files, "0:web 321:both 480:sizes", 100).train
    found = [tokens_of(train, sample) for sample in range(100)]
    expected = [*alone(files, "web", 41, 0), *alone(files, "both", 19, 1), *alone(files, "sizes", 40, 2)]
    assert found == expected
    assert all(token in WEB for text in found[:41] for token in text)
    assert any(token in CODE for text in found[41:60] for token in text)


def test_the_same_data_in_a_later_phase_come_in_another_order(files: Path) -> None:
    train = build(files, "0:web 320:web", 80).train
    first, second = ([tokens_of(train, n) for n in range(begin, begin + 40)] for begin in (0, 40))
    assert first != second


def test_a_phase_that_gets_longer_keeps_its_order(files: Path) -> None:
    """Its end moves, or the training's; of the second phase 5 samples are consumed."""
    before = build(files, "0:web 320:code", 60)
    meta = {"data_phases": to_meta(before.phases), "consumed_samples": 45}
    longer = build(files, "0:web 320:code 800:web", 400, earlier_requests=[phase.requests for phase in before.phases])
    assert phase_differences(meta, longer.phases) == []
    found = [tokens_of(longer.train, n) for n in range(60)]
    assert found == [tokens_of(before.train, n) for n in range(60)]
    assert [phase.requests for phase in longer.phases] == [(40,), (20, 60), (300,)]


def test_samples_of_phases() -> None:
    steps = [(0, "a"), (10, "b"), (30, "c")]
    assert PhasedDataset.asked_of(steps, 100) == [10, 20, 70]
    assert PhasedDataset.asked_of(steps, 20) == [10, 10, 1], "a phase that is not reached is looked at all the same"
    assert PhasedDataset.asked_of(steps, 1) == [1, 1, 1]


EDITS = {
    "0:web 320:both 640:code": None,
    "0:web 320:both 700:code": None,
    "0:web 320:both 640:sizes": None,
    "0:web 320:both 400:code 640:web": None,
    "0:web 320:both": None,
    "0:web 320:both 392:code": None,
    "0:web 320:both 376:code": "phase 3 ({0}/code.txt) would begin before the 49 samples that are consumed",
    "0:web 200:both": "phase 2 ({0}/both.txt) has begun and is now from sample 25 (checkpoint 40)",
    "0:web 328:both 640:code": "phase 2 ({0}/both.txt) has begun and is now from sample 41 (checkpoint 40)",
    "0:web": "phase 2 ({0}/both.txt) has begun and is gone",
    "0:web 320:sizes 640:code": "phase 2 ({0}/sizes.txt) has begun and its weights differ",
    "0:both 320:both 640:code": "phase 1 ({0}/both.txt) has begun and its weights differ",
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_has_begun_may_not_be_edited(edit: str, files: Path) -> None:
    """Of a run that has consumed 49 samples: the second phase, from sample 40 on, has begun, the third has not."""
    before = build(files, "0:web 320:both 640:code", 120)
    meta = {"data_phases": to_meta(before.phases), "consumed_samples": 49}
    expected = EDITS[edit]
    told = [] if expected is None else [f"`data_schedule`: {expected.format(files)}"]
    assert phase_differences(meta, build(files, edit, 120).phases) == told


def test_other_tokens_of_a_phase_that_has_begun_are_named(files: Path) -> None:
    before = build(files, "0:web 320:code", 120)
    write_documents(files / "code", [[150, 151] * 10] * 60)
    after = build(files, "0:web 320:code", 120)
    meta = {"data_phases": to_meta(before.phases), "consumed_samples": 41}
    (told,) = phase_differences(meta, after.phases)
    assert told.startswith(f"`data_schedule`: phase 2 ({files}/code.txt) has begun: ")
    assert "60 documents of 1,200 tokens (checkpoint 60 documents of 540 tokens)" in told
    assert phase_differences({**meta, "consumed_samples": 40}, after.phases) == [], "its first sample is the next one"


def test_a_run_that_had_no_phases_may_get_them(files: Path) -> None:
    plain = build(files, None, 120, data_args_path=str(files / "web.txt"))
    meta = {"data": surveys_to_meta(plain.surveys), "consumed_samples": 50}
    later = build(files, "0:web 480:code", 120, earlier_requests=[plain.train_requests])
    assert phase_differences(meta, later.phases) == []
    assert [tokens_of(later.train, n) for n in range(60)] == [tokens_of(plain.train, n) for n in range(60)]
    (told,) = phase_differences(meta, build(files, "0:web 320:code", 120).phases)
    assert told == f"`data_schedule`: phase 2 ({files}/code.txt) would begin before the 50 samples that are consumed"
    begun = {"data_phases": to_meta(build(files, "0:web 320:code", 120).phases), "consumed_samples": 50}
    assert phase_differences(begun, plain.phases) == ["`data_schedule`: not given, and 2 of its phases have begun"]


@pytest.mark.parametrize("phases", [3, [{"first": 0}], [[]], "HUGE"], ids=["number", "fields", "list", "negative"])
def test_a_damaged_account_is_one_line(phases: object, files: Path) -> None:
    now = build(files, "0:web 320:code", 120).phases
    if phases == "HUGE":
        phases = [{**one, "first": -1} for one in to_meta(now)]
    with pytest.raises(DataError, match="the checkpoint's account of its phases is damaged"):
        phase_differences({"data_phases": phases, "consumed_samples": 1}, now)


def test_validation_has_the_first_phase_or_data_of_its_own(files: Path) -> None:
    given = {"split": "8,2", "data_schedule": f"0:{files}/web.txt 320:{files}/code.txt"}
    common = {"seq_length": 8, "train_samples": 80, "valid_samples": 4, "test_samples": 0, "seed": 3}
    common |= {"tokenizer": NullTokenizer(300), "cache_dir": files / "cache"}
    shared = build_datasets(config(**given), **common)  # type: ignore[arg-type]
    assert all(token in WEB for n in range(4) for token in tokens_of(shared.valid, n))
    assert [part.end for part in shared.train.parts] == [48, 48], "training has the training part of each phase"
    own = build_datasets(config(**given, valid_data_path=(str(files / "code"),)), **common)  # type: ignore[arg-type]
    assert all(token in CODE for n in range(4) for token in tokens_of(own.valid, n))
    assert [part.end for part in own.train.parts] == [60, 60], "all of it, where validation has data of its own"
