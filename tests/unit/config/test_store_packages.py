"""A store whose package is not installed is named with the other files, before a rank starts."""

from __future__ import annotations

import pytest
from config_arguments import argv, problems_of

from megalite.config import files, parse_with_origins
from megalite.extras import lacks
from megalite.train.dry_run import dry_run


def test_a_package_that_a_store_needs_is_asked_for_with_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "lacks", lambda package: package == "s3fs")
    for flags, line in (
        ("--save s3://bucket/run", "--save=s3://bucket/run: needs the package s3fs; pip install "),
        ("--data-path s3://bucket/corpus", "--data-path=s3://bucket/corpus: needs the package s3fs; pip install "),
        ("--save gs://bucket/run", ""),
        ("--save run", ""),
    ):
        given = [word for word in argv(flags) if "--data-path" not in flags or word != "--mock-data"]
        if not line:
            assert parse_with_origins(given)
            continue
        (found,) = problems_of(given)
        assert found.startswith(line) and found.endswith('[cloud]"')
    # a cluster's host may have it: a dry run says so, and checks the rest
    parsed = parse_with_origins(argv("--save s3://bucket/run --dry-run"), world_size=64)
    assert not any("s3fs" in line for line in parsed.warnings), "once, by the dry run"
    assert dry_run(parsed.config, parsed.origins, 64).count("needs the package s3fs") == 1
    assert lacks("no_such_package") and not lacks("json")
