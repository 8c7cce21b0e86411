"""The console: one line per log interval with Megatron-LM's field names, which people's scripts search for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from typing import TextIO

from megalite.observe.hooks import Hook, TrainerView
from megalite.observe.stats import Record

#: Field names as Megatron-LM prints them, the record's key and the format; a key that is absent leaves the field out.
#: The fields in % are shares in the record.
_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("consumed samples", "consumed_samples", "12d"),
    ("elapsed time per iteration (ms)", "iteration_time_ms", ".1f"),
    ("throughput per GPU (TFLOP/s/GPU)", "tflops_per_device", ".3g"),
    ("learning rate", "learning_rate", ".6E"),
    ("global batch size", "global_batch_size", "5d"),
    ("lm loss", "lm_loss", ".6E"),
    ("loss scale", "loss_scale", ".1f"),
    ("grad norm", "grad_norm", ".3f"),
    ("number of skipped iterations", "skipped_iterations", "3d"),
    ("number of nan iterations", "nan_iterations", "3d"),
    # megalite's own fields follow, so that what reads Megatron's line finds its fields where it expects them
    ("load balancing loss", "load_balancing_loss", ".6E"),
    ("z loss", "z_loss", ".6E"),
    ("fullest expert", "fullest_expert", ".2f"),
    ("load entropy", "load_entropy", ".3f"),
    ("dropped (%)", "dropped_fraction", ".2f"),
    ("embedding cache hits (%)", "embedding_hit_rate", ".2f"),
    ("embedding bytes up", "embedding_bytes_up", ".3e"),
    ("embedding bytes down", "embedding_bytes_down", ".3e"),
    ("tokens per second", "tokens_per_second", ",.0f"),
    ("MFU (%)", "mfu", ".1f"),
    ("sequence length", "seq_length", "d"),
)


class ConsoleHook(Hook):
    """Prints a line per log interval and evaluation, and one at the end.

    Args:
        stream: where to; the standard output of the moment by default.
        now: the time that precedes a line.
    """

    def __init__(self, stream: TextIO | None = None, *, now: Callable[[], datetime] = datetime.now) -> None:
        self._stream = stream
        self._now = now

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        self._print(train_line(record, trainer.train_iters, self._now()))
        if (rank := record.get("slowest_rank")) is not None:
            ratio, host = record["slowest_rank_ratio"], record.get("slowest_rank_host", "")
            self._print(f" slow rank: rank {rank} ({host}) works {ratio:.2f} x as long as the others")

    def on_evaluation(self, trainer: TrainerView, record: Record) -> None:
        self._print(evaluation_line(record))

    def on_samples(self, trainer: TrainerView, records: list[Record]) -> None:
        for record in records:
            prompt, text = (json.dumps(record[key], ensure_ascii=False) for key in ("prompt", "text"))
            text = "its logits are not numbers" if record["text"] is None else text
            self._print(f" sample at iteration {record['iteration']} | {prompt} -> {text} |")

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        goodput = summary.get("goodput")
        share = f", {goodput:.0%} of it in training steps" if goodput is not None else ""
        self._print(
            f" {summary['status']} at iteration {summary['iteration']} after {summary['wall_time_s']:.1f} s{share}"
        )

    def _print(self, line: str) -> None:
        stream = self._stream or sys.stdout
        stream.write(line + "\n")
        stream.flush()


def train_line(record: Record, train_iters: int, now: datetime) -> str:
    """The line of a `"train"` record, e.g. ` [2026-01-01 00:00:00.000000] iteration 1/ 10 | consumed samples: ...`."""
    parts = [f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {record['iteration']:8d}/{train_iters:8d}"]
    for name, key, spec in _FIELDS:
        if (value := record.get(key)) is not None:
            parts.append(f"{name}: {format(100 * value if '(%)' in name else value, spec)}")
    return " | ".join(parts) + " |"


def evaluation_line(record: Record) -> str:
    """The line of a `"valid"` or `"test"` record, with Megatron-LM's `lm loss value` and `lm loss PPL`."""
    name = {"valid": "validation"}.get(record["kind"], record["kind"])
    parts = [
        f" {name} loss at iteration {record['iteration']}",
        f"lm loss value: {record['lm_loss']:.6E}",
        f"lm loss PPL: {record['ppl']:.6E}",
    ]
    if "bits_per_byte" in record:
        parts.append(f"bits per byte: {record['bits_per_byte']:.4f}")
    return " | ".join(parts) + " |"
