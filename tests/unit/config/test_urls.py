"""A URL where a path is expected -> one line, and nothing is written; where a store may stand, only what one serves."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import argv, problems_of

from megalite.checkpoint import Checkpointer
from megalite.comm import Axis
from megalite.config.root import all_options
from megalite.errors import CheckpointError, in_flags
from megalite.files import served_url, url_problem

NO_PATH = "is a URL, and this takes a path; give a folder of a file system"
CAN = " (stores take checkpoints and tokens: --save, --load, --data-path)"
NO_STORE = "is a URL, and no store of megalite serves {} (it serves s3, gs); give one of those, or a folder"
NO_PLACE = "is no place in a store; write {}://BUCKET/NAME"
URLS = {
    "s3://bucket/run": "s3",
    "S3://bucket/run": "s3",
    " s3://bucket/run": "s3",
    "s3:/bucket/run": "s3",
    "s3a://bucket/run": "s3a",
    "s3:///run": "s3",
    "s3://": "s3",
    "gs://bucket": "gs",
    "hdfs://namenode:8020/user/run": "hdfs",
    "abfss://container@account.dfs.core.windows.net/run": "abfss",
    "az://container/run": "az",
    "dbfs:/mnt/run": "dbfs",
    "msc://profile/run": "msc",
    "https://host/run?x=1": "https",
    "http://user:password@host:80/run": "http",
    "hf://datasets/x": "hf",
    "ssh://host/run": "ssh",
    "git+https://host/run": "git+https",
    "memory://run": "memory",
    "simplecache::s3://bucket/run": "s3",
    "dask::simplecache::gs://bucket/run": "gs",
    "x-y.z+1://run": "x-y.z+1",
}
FILES = {
    "file:///data/run": "/data/run",
    "file://localhost/data/run": "/data/run",
    "file:/data/run": "/data/run",
    "FILE:///data": "/data",
}
PLACES = ["run", "./s3:/bucket/run", "/s3:/x", "a:b", "c:/x", "3d:/x", "runs/s3://x", "lm.py:factory", "~/x", "10:30/x"]


def test_what_is_a_url() -> None:
    for url, scheme in URLS.items():
        assert in_flags(str(url_problem(url))) == NO_PATH + CAN * (scheme in ("s3", "gs", "memory"))
    assert {url: url_problem(url) for url in FILES} == {
        url: f"is a URL; give the path, {place}" for url, place in FILES.items()
    }
    assert [place for place in PLACES if url_problem(place)] == []


def test_what_a_store_serves() -> None:
    served = {url for url in URLS if url_problem(url, stores=True) is None}
    assert served == {"s3://bucket/run"}
    assert served_url("s3://bucket/run/") == ("s3", "bucket", "run")
    assert served_url("gs://b.c-d/x/y_1/z.2") == ("gs", "b.c-d", "x/y_1/z.2")
    for url in (
        "s3:/bucket/run",
        "s3:///run",
        "s3://",
        "gs://bucket",
        "s3://b//x",
        "s3://b/x y",
        "s3://b/x?y=1",
        " s3://b/x",
    ):
        assert url_problem(url, stores=True) == NO_PLACE.format(url.strip()[:2])
    assert str(url_problem("memory://x/run", stores=True)).startswith("is this process's memory")
    assert url_problem("hdfs://namenode/x", stores=True) == NO_STORE.format("hdfs")
    assert {url: url_problem(url, stores=True) for url in FILES} == {
        url: f"is a URL; give the path, {place}" for url, place in FILES.items()
    }
    assert [place for place in PLACES if url_problem(place, stores=True)] == []


def test_every_flag_that_takes_a_path_refuses_it_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = [option for option in all_options().values() if option.names_a_file]
    assert len(options) >= 16
    stores = {option.flag for option in options if option.facts.get("stores")}
    assert stores == {"--save", "--load"} | {f"--{split}data-path" for split in ("", "train-", "valid-", "test-")}
    assert {"--data-cache-path", "--tensorboard-dir", "--checkpoint-staging-path"} < {o.flag for o in options} - stores
    for flag in [option.flag for option in options]:
        own = f"{flag} hdfs://bucket/x --save-interval 5 --auto-resume --sample-interval 4 --train-iters 8"
        lines = [line for line in problems_of(argv(own, without="mock-data")) if "hdfs" in line]
        assert lines == [f"{flag}=hdfs://bucket/x: {NO_STORE.format('hdfs') if flag in stores else NO_PATH}"]
    assert problems_of(argv("--save s3://x --save-interval 5 --auto-resume --keep-last-n 3")) == [
        f"--save=s3://x: {NO_PLACE.format('s3')}"
    ]
    assert list(tmp_path.iterdir()) == []


def test_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("checkpoint:\n  save: gs://bucket\n")
    assert problems_of(argv("--config run.yaml")) == [f"run.yaml:2: save=gs://bucket: {NO_PLACE.format('gs')}"]
    (tmp_path / "words").write_text("0.5 az://bucket/a\n0.5 b\n")
    (line,) = problems_of(argv("--data-args-path words", without="mock-data"))
    assert line == f"--data-args-path=words: az://bucket/a {NO_STORE.format('az')}"


def test_in_a_program() -> None:
    with pytest.raises(CheckpointError, match="hdfs://bucket/run is a URL"):
        Checkpointer("hdfs://bucket/run", world=Axis.single("world"))
