"""The validator as a sampler uses it: pure, fast, right about every couple of schedule and ZeRO stage."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

from megalite import schedule as schedules
from megalite.config import Config, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig, config_problems
from megalite.config.parallel import SCHEDULES
from megalite.config.training import Precision, TrainingLength
from megalite.config.yaml_file import read_yaml
from megalite.errors import ConfigError, in_flags

MODEL = ModelConfig(
    num_layers=16, hidden_size=64, num_attention_heads=8, seq_length=32, vocab_size=64,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip


def problems(config: Config, world_size: int) -> list[str]:
    """In the words of the command line."""
    return [in_flags(line) for line in config_problems(config, world_size)]


def config_of(samples: int = 16, **parallel: object) -> Config:
    return Config(
        model=MODEL,
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
        training=TrainingConfig(micro_batch_size=1, global_batch_size=samples, length=TrainingLength(train_iters=10)),
        optimizer=OptimizerConfig(lr=1e-3, clip_grad=0.0),
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("tensor", [1, 2])
def test_every_couple_of_schedule_and_zero_stage(name: str, zero_stage: int, tensor: int) -> None:
    config = config_of(
        32,
        pipeline_schedule=name,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2 if name in ("interleaved", "breadth-first") else None,
        tensor_model_parallel_size=tensor,
        zero_stage=zero_stage,
    )
    lines = problems(config, 4 * tensor)
    # 2BW holds two weight versions and never flushes; PipeDream steps after every micro-batch; the others flush.
    legal = {"2bw": {0, 1}, "pipedream": {0}}.get(name, {0, 1, 2, 3})
    if zero_stage in legal:
        assert lines == []
    else:
        assert len(lines) == 1
        assert lines[0].startswith(f"--zero-stage={zero_stage}: not with --pipeline-schedule={name}: ")
        assert lines[0].endswith(f"; legal: {','.join(str(stage) for stage in sorted(legal))}")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"recompute_granularity": "full"}, "--recompute-granularity=full: {} recomputes whole stages itself; leave"),
        ({"cpu_offloading_num_layers": 1}, "--cpu-offloading-num-layers=1: {} recomputes whole stages and keeps the"),
        ({"recompute_granularity": "selective"}, None),
    ],
)
def test_nothing_is_recomputed_twice(given: dict[str, object], line: str | None) -> None:
    for size in (1, 2):
        config = config_of(pipeline_schedule="shifted-critical-path", pipeline_model_parallel_size=size)
        config = dataclasses.replace(config, model=dataclasses.replace(MODEL, **given))  # type: ignore[arg-type]
        lines = problems(config, size)
        if line is None or size == 1:  # on one rank, the last, nothing is recomputed
            assert lines == []
        else:
            assert len(lines) == 1 and lines[0].startswith(line.format("--pipeline-schedule=shifted-critical-path"))


@pytest.mark.parametrize("seed", range(8))
def test_what_is_legal_is_consistent_and_builds(seed: int) -> None:
    draw = random.Random(seed)
    accepted = 0
    for _ in range(150):
        world_size = draw.choice([1, 2, 3, 4, 6, 8, 16])
        config = config_of(
            draw.choice([1, 2, 4, 6, 8, 12, 16, 32]),
            tensor_model_parallel_size=draw.choice([1, 2, 3, 4]),
            pipeline_model_parallel_size=draw.choice([1, 2, 3, 4]),
            virtual_pipeline_model_parallel_size=draw.choice([None, None, 1, 2, 3]),
            pipeline_schedule=draw.choice([None, *SCHEDULES]),
            zero_stage=draw.randrange(4),
        )
        if problems(config, world_size):
            continue
        accepted += 1
        parallel, replicas = config.parallel, config.data_parallel_size(world_size)
        assert parallel.model_parallel_size * replicas == world_size
        micro_batches = config.num_microbatches(world_size)
        assert micro_batches * replicas * config.training.micro_batch_size == config.global_batch_size(world_size)
        assert MODEL.num_attention_heads % parallel.tensor_model_parallel_size == 0
        program = schedules.build_program(
            parallel.schedule,
            parallel.pipeline_model_parallel_size,
            micro_batches,
            parallel.virtual_pipeline_model_parallel_size,
        )
        assert program.num_stages <= MODEL.num_layers
    assert accepted >= 5


def test_a_schedule_that_needs_its_own_chunks_is_told() -> None:
    config = config_of(pipeline_schedule="1f1b", pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    (line,) = problems(config, 2)
    assert line.startswith("--virtual-pipeline-model-parallel-size=2: 1f1b has 1 chunk per rank")
    assert ParallelConfig(virtual_pipeline_model_parallel_size=2).schedule == "interleaved"
    assert ParallelConfig(pipeline_schedule="zbv").num_chunks == 2


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"clip_grad": 1.0}, "--clip-grad=1: pipedream takes a step"),
        ({"precision": Precision(fp16=True)}, "--fp16: pipedream takes a step"),
        ({"untie_embeddings_and_output_weights": False}, "--pipeline-schedule=pipedream: pipedream takes a step"),
    ],
)
def test_pipedream_refuses_what_needs_the_whole_pipeline_at_a_step(changes: dict[str, object], flag: str) -> None:
    config = config_of(pipeline_schedule="pipedream", pipeline_model_parallel_size=2)
    for section in ("model", "training", "optimizer"):
        values = getattr(config, section)
        own = {name: value for name, value in changes.items() if hasattr(values, name)}
        config = dataclasses.replace(config, **{section: dataclasses.replace(values, **own)})
    (line,) = problems(config, 2)
    assert line.startswith(flag)


def test_out_of_bounds_values_do_not_break_the_other_rules() -> None:
    config = config_of(0, tensor_model_parallel_size=0, pipeline_model_parallel_size=-3, pipeline_schedule="nonsense")
    lines = problems(config, 1)
    flags = ["--tensor-model-parallel-size=0", "--pipeline-model-parallel-size=-3", "--pipeline-schedule=nonsense"]
    for flag in [*flags, "--global-batch-size=0"]:
        assert sum(line.startswith(flag) for line in lines) == 1, lines


def test_judging_a_layout_takes_a_millisecond() -> None:
    config = config_of()
    problems(config, 1)
    begin = time.process_time()
    for _ in range(50):
        problems(config, 1)
    assert (time.process_time() - begin) / 50 < 5e-3


@pytest.mark.parametrize("seed", range(4))
def test_mutilated_yaml_raises_only_our_error(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    draw = random.Random(seed)
    text = "model:\n  num_layers: 4\n  activation: 'gelu'\ndata_path: [a, b]\nlr: 1e-3 # c\nbf16: no\n"
    path = tmp_path_factory.mktemp("yaml") / "run.yaml"
    alphabet = "\t\n\r\0 :-?[]{}&*!|>'\"%@`#,~\\abN0.e\x85\u2028\ufeff"
    for _ in range(100):
        letters = list(text)
        for _ in range(draw.randrange(1, 6)):
            position = draw.randrange(len(letters))
            letters[position : position + draw.randrange(3)] = draw.choices(alphabet, k=draw.randrange(4))
        path.write_text("".join(letters), encoding="utf-8")
        problems: list[str] = []
        try:
            read_yaml(str(path), problems)
        except ConfigError as error:
            problems += error.problems
        assert all("\n" not in line for line in problems)
