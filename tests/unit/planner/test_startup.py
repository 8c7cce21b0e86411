"""The start-up table says what will run, and no torch is needed to print it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

from megalite.config import Config
from megalite.inventory import given_plan
from megalite.planner import PlannedStages
from megalite.planner.startup_table import format_table, startup_rows
from megalite.progress import in_units
from megalite.schedule import build_program, lower
from megalite.train.resume_report import changes
from tests.unit.observe.fake_trainer import tiny_config


def _config(*, training: dict[str, Any] | None = None, **parallel: Any) -> Config:
    config = tiny_config()
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, **(training or {})),
        parallel=dataclasses.replace(config.parallel, **parallel),
    )


def test_the_table_says_what_will_run() -> None:
    config = _config(
        pipeline_model_parallel_size=2, zero_stage=1, pipeline_schedule="2bw", training={"global_batch_size": 24}
    )
    cuts = [range(2), range(2, 4)]
    run = PlannedStages(config, 4, lower(build_program("2bw", 2, 4)), cuts, given_plan(config))
    text = format_table(startup_rows(run))
    correction = "staleness correction predict (weights 2 updates ahead for each update of delay)"
    assert f"pp2 x dp2, schedule 2bw, {correction}, ZeRO stage 1, on 4 x CPU" in text
    assert "24 samples = 4 micro-batches of 3 on 2 replicas; 96 tokens per step" in text
    assert "1.87 k (1,872)" in text
    assert "Megatron's convention" in text


def test_a_schedule_file_is_named_in_the_table_and_where_a_run_goes_on() -> None:
    before = _config(pipeline_model_parallel_size=2)
    now = _config(pipeline_model_parallel_size=2, pipeline_schedule_file="mine.txt")
    program, cuts = lower(build_program("1f1b", 2, 4)), [range(2), range(2, 4)]
    rows = [dict(startup_rows(PlannedStages(each, 2, program, cuts, given_plan(each)))) for each in (before, now)]
    assert [row["layout"] for row in rows] == [
        "pp2, schedule 1f1b, on 2 x CPU",
        "pp2, schedule of mine.txt, on 2 x CPU",
    ]
    assert changes(before, 2, now, 2) == {"layout:": ("pp2, schedule 1f1b", "pp2, schedule of mine.txt")}


def test_units() -> None:
    found = [in_units(n, "B") for n in (0, 999, 1000, 1234567, 5e18, 5e21)]
    assert found == ["0 B", "999 B", "1 kB", "1.23 MB", "5 EB", "5e+03 EB"]
    assert in_units(12) == "12"


def test_no_torch_is_imported() -> None:
    code = "import sys; from megalite.planner import startup_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
