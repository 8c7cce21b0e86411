"""The record of a log interval: means, rates and counts from hand-computed numbers."""

from __future__ import annotations

import io
import math
from datetime import datetime

import pytest
import torch

from megalite.observe.loggers import ConsoleHook, train_line
from megalite.observe.stats import ExpertStats, IntervalStats, StepStats, evaluation_record, expert_loads
from megalite.planner.hardware import peak_flops
from tests.unit.observe.fake_trainer import FakeTrainer, timed_by, tiny_config


def _interval(**changes: list) -> dict:
    trainer = FakeTrainer(tiny_config())
    interval = IntervalStats(trainer.config, world_size=2, device=trainer.device)
    for values in zip(*changes.values(), strict=True):
        interval.add(trainer.step(**dict(zip(changes, values, strict=True))))
    with timed_by(lambda: 0.0):
        return interval.record()


def test_loss_is_the_mean_in_full_precision_and_may_be_a_tensor() -> None:
    record = _interval(lm_loss=[torch.tensor(0.1, dtype=torch.float64), 0.2, torch.tensor(0.3, dtype=torch.float64)])
    assert record["lm_loss"] == math.fsum([0.1, 0.2, 0.3]) / 3
    assert record["iteration"] == 3
    assert record["consumed_samples"] == 9
    assert record["consumed_tokens"] == 36


def test_a_skipped_step_has_no_part_in_the_loss_and_no_norm() -> None:
    record = _interval(lm_loss=[1.0, math.nan], skipped=[False, True], grad_norm=[1.0, math.inf])
    assert record["lm_loss"] == 1.0
    assert record["grad_norm"] is None
    assert record["skipped_iterations"] == 1
    assert record["nan_iterations"] == 1


def test_steps_without_a_counted_label_are_no_part_of_the_loss() -> None:
    counted = [0.0, 3.0, torch.tensor(0.0), 1.0]
    record = _interval(lm_loss=[0.0, 5.0, torch.tensor(0.0), 7.0], counted_tokens=counted)
    assert record["lm_loss"] == 6.0 and record["uncounted_iterations"] == 2
    none = _interval(lm_loss=[0.0, 0.0], counted_tokens=[0.0, 0.0])
    assert none["lm_loss"] == 0.0 and none["uncounted_iterations"] == 2
    assert "uncounted_iterations" not in _interval(lm_loss=[0.0], counted_tokens=[0.0], skipped=[True])
    learnt = _interval(lm_loss=[1.0, 0.0], counted_tokens=[8.0, 8.0])
    assert learnt["lm_loss"] == 0.5 and "uncounted_iterations" not in learnt, "known by heart, and counted"


def test_steps_without_a_counted_label_are_told_beside_megatrons_line() -> None:
    trainer, stream = FakeTrainer(tiny_config()), io.StringIO()
    record = _interval(lm_loss=[0.0, 5.0], counted_tokens=[0.0, 1.0])
    ConsoleHook(stream).on_log(trainer, record)
    line, said = stream.getvalue().splitlines()
    assert line == train_line(record, trainer.train_iters, datetime.fromisoformat(line[2:28]))
    assert "lm loss: 5.000000E+00" in line and said.startswith(" no token counts: in 1 of 2 iterations ")


def test_an_interval_of_skipped_steps_has_no_loss() -> None:
    assert _interval(lm_loss=[None, None], skipped=[True, True])["lm_loss"] is None


def test_rates_count_the_work_of_the_interval() -> None:
    record = _interval(iteration_time_s=[0.5, 1.5])
    assert record["iteration_time_ms"] == 1000.0
    assert record["tokens_per_second"] == 6 * 4 / 2.0
    # 3 x 2 operations per multiply-add: projections 4 h h, MLP 2 x 4 h h, L = 2; logits h x 16; half of the s x s core
    per_token = 6 * (2 * (4 * 64 + 8 * 64) + 8 * 16) + 2 * 6 * 8 * 4
    assert record["tflops_per_device"] == pytest.approx(per_token * 12.0 / 2 / 1e12)
    assert record["mfu"] is None, "the peak of a CPU is not known"


def test_waiting_for_the_device_at_log_time_counts_as_step_time() -> None:
    trainer = FakeTrainer(tiny_config())
    interval = IntervalStats(trainer.config, world_size=1, device=trainer.device)
    interval.add(trainer.step(iteration_time_s=0.75))
    with timed_by(iter([10.0, 10.25]).__next__):
        assert interval.record()["iteration_time_ms"] == 1000.0


def test_a_record_closes_its_interval() -> None:
    trainer = FakeTrainer(tiny_config())
    interval = IntervalStats(trainer.config, world_size=1, device=trainer.device)
    interval.add(trainer.step(lm_loss=5.0))
    interval.record()
    assert len(interval) == 0
    interval.add(trainer.step(lm_loss=3.0))
    assert interval.record()["lm_loss"] == 3.0


def test_bits_per_byte_do_not_depend_on_the_tokenizer() -> None:
    # a text of 80 bytes that costs 160 bits, cut into 20 tokens or into 40
    coarse = evaluation_record("valid", 7, loss_sum=160 * math.log(2), num_tokens=20, num_bytes=80)
    fine = evaluation_record("valid", 7, loss_sum=160 * math.log(2), num_tokens=40, num_bytes=80)
    assert coarse["bits_per_byte"] == pytest.approx(2.0)
    assert fine["bits_per_byte"] == pytest.approx(2.0)
    assert fine["ppl"] == pytest.approx(2**4)
    assert "bits_per_byte" not in evaluation_record("valid", 7, loss_sum=1.0, num_tokens=20)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-SXM2-32GB", "bf16", 15.7e12),  # which has no bf16 units
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("cpu", "bf16", None),
    ],
)
def test_peaks_by_device_name(name: str, precision: str, peak: float | None) -> None:
    assert peak_flops(name, precision) == peak


def test_step_stats_are_frozen() -> None:
    with pytest.raises(AttributeError):
        FakeTrainer(tiny_config()).step().iteration = 3  # type: ignore[misc]
    assert StepStats.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_loads_of_experts_are_those_of_all_steps() -> None:
    """Percent of the mean by block, the entropy of the least even one; of many experts every nth block's."""
    one, two = torch.tensor([[4.0, 0.0], [1.0, 3.0]]), torch.tensor([[0.0, 4.0], [2.0, 2.0]])
    found = expert_loads([ExpertStats(expert_load=table, layers=(1, 3)) for table in (one, two)])
    assert found["expert_load"] == {"1": [100, 100], "3": [75, 125]}
    shares = (3 / 8, 5 / 8)
    assert found["load_entropy"] == pytest.approx(-sum(share * math.log(share) for share in shares) / math.log(2))
    many = expert_loads([ExpertStats(expert_load=torch.ones(96, 128), layers=tuple(range(96)))])
    assert list(many["expert_load"]) == [str(n) for n in range(0, 96, 6)] and many["load_entropy"] == pytest.approx(1)
    assert expert_loads([ExpertStats()]) == {}
