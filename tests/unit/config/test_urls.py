"""A URL where a path is expected -> one line, and nothing is written: no store serves it."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import argv, problems_of

from megalite.checkpoint import Checkpointer
from megalite.comm import Axis
from megalite.config.root import all_options
from megalite.errors import CheckpointError
from megalite.files import url_problem

NO_STORE = "is a URL, and no store of megalite serves {}; give a folder of a file system that all hosts share"
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
    assert {url: url_problem(url) for url in URLS} == {url: NO_STORE.format(scheme) for url, scheme in URLS.items()}
    assert {url: url_problem(url) for url in FILES} == {
        url: f"is a URL; give the path, {place}" for url, place in FILES.items()
    }
    assert [place for place in PLACES if url_problem(place)] == []


def test_every_flag_that_takes_a_path_refuses_it_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [option.flag for option in all_options().values() if option.names_a_file]
    assert len(flags) >= 16
    assert {"--save", "--load", "--data-path", "--data-cache-path", "--tensorboard-dir"} < set(flags)
    for flag in flags:
        own = f"{flag} s3://bucket/x --save-interval 5 --auto-resume --sample-interval 4 --train-iters 8"
        lines = [line for line in problems_of(argv(own, without="mock-data")) if "s3" in line]
        assert lines == [f"{flag}=s3://bucket/x: {NO_STORE.format('s3')}"]
    assert problems_of(argv("--save s3://x --save-interval 5 --auto-resume --keep-last-n 3")) == [
        f"--save=s3://x: {NO_STORE.format('s3')}"
    ]
    assert list(tmp_path.iterdir()) == []


def test_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("checkpoint:\n  save: gs://bucket\n")
    assert problems_of(argv("--config run.yaml")) == [f"run.yaml:2: save=gs://bucket: {NO_STORE.format('gs')}"]
    (tmp_path / "words").write_text("0.5 s3://bucket/a\n0.5 b\n")
    (line,) = problems_of(argv("--data-args-path words", without="mock-data"))
    assert line == f"--data-args-path=words: s3://bucket/a {NO_STORE.format('s3')}"


def test_in_a_program() -> None:
    with pytest.raises(CheckpointError, match="s3://bucket/run is a URL"):
        Checkpointer("s3://bucket/run", world=Axis.single("world"))
