"""Loggers of a run: the console, TensorBoard and Weights & Biases, under Megatron-LM's names.

The console has one line per log interval, with the field names that people's scripts search for. TensorBoard and wandb
are optional packages; `make_hooks` wraps them in `guarded`: a missing package, a lost network or a full disk costs one
warning and the tracker, never the training.
"""

import inspect
import json
import logging
import shutil
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from megalite.checkpoint import committed
from megalite.config import Config, to_dict
from megalite.errors import DataError, flag_of, rank_name
from megalite.extras import optional_package
from megalite.observe.hooks import Hook, TrainerView
from megalite.observe.stats import Record, StepStats
from megalite.progress import duration, is_terminal
from megalite.stores import place

logger = logging.getLogger(__name__)

#: Field names as Megatron-LM prints them, the record's key, the format, and the tag of trackers, or "" for none; a key
#: that is absent leaves the field out. The fields in % are shares in the record.
_FIELDS: tuple[tuple[str, str, str, str], ...] = (
    ("consumed samples", "consumed_samples", "12d", ""),
    ("elapsed time per iteration (ms)", "iteration_time_ms", ".1f", ""),
    ("throughput per GPU (TFLOP/s/GPU)", "tflops_per_device", ".3g", "throughput"),
    ("learning rate", "learning_rate", ".6E", "learning-rate"),
    ("global batch size", "global_batch_size", "5d", "batch-size"),
    ("lm loss", "lm_loss", ".6E", "lm loss"),
    ("loss scale", "loss_scale", ".1f", "loss-scale"),
    ("grad norm", "grad_norm", ".3f", "grad-norm"),
    ("number of skipped iterations", "skipped_iterations", "3d", "skipped-iterations"),
    ("number of nan iterations", "nan_iterations", "3d", ""),
    # megalite's own fields follow, so that what reads Megatron's line finds its fields where it expects them
    ("load balancing loss", "load_balancing_loss", ".6E", "load_balancing_loss"),
    ("z loss", "z_loss", ".6E", "z_loss"),
    ("fullest expert", "fullest_expert", ".2f", "fullest-expert"),
    ("load entropy", "load_entropy", ".3f", "load-entropy"),
    ("dropped (%)", "dropped_fraction", ".2f", "dropped-fraction"),
    ("embedding cache hits (%)", "embedding_hit_rate", ".2f", "embedding-hit-rate"),
    ("embedding bytes up", "embedding_bytes_up", ".3e", "embedding-bytes-up"),
    ("embedding bytes down", "embedding_bytes_down", ".3e", "embedding-bytes-down"),
    ("tokens per second", "tokens_per_second", ",.0f", "tokens-per-second"),
    ("MFU (%)", "mfu", ".1f", "mfu"),
    ("sequence length", "seq_length", "d", ""),
    ("device hours", "device_hours", ",.3g", ""),
)

_EVALUATED = (
    ("lm loss value", "lm_loss", ".6E", "lm loss {}"),
    ("lm loss PPL", "ppl", ".6E", "lm loss {} ppl"),
    ("bits per byte", "bits_per_byte", ".4f", "bits per byte {}"),
    ("lm loss value of the average", "ema_lm_loss", ".6E", "lm loss {} ema"),
)

COLUMNS = 100
"""Width that a line on a terminal keeps to."""


class ConsoleHook(Hook):
    """Prints a line per log interval and evaluation, and one at the end: on a terminal a short one, elsewhere
    Megatron-LM's. stream: where to, or a file to append to; the standard output of the moment by default."""

    def __init__(self, stream: TextIO | Path | None = None) -> None:
        self._stream = stream
        self._stepped, self._saved = False, ""

    def after_step(self, trainer: TrainerView, stats: StepStats) -> None:
        """A sign of life where the first line of the log is far away."""
        every, last = trainer.config.logging.log_interval, trainer.train_iters
        following = min(last, (stats.iteration // every + 1) * every)
        if not self._stepped and stats.iteration % every and stats.iteration < last:
            left = duration((last - stats.iteration) * stats.iteration_time_s)
            self._print(
                f" first iteration ({stats.iteration:,} of {last:,}) done after {stats.iteration_time_s:.1f} s; if all "
                f"took as long, {left} would be left (most are faster); the next line comes at iteration {following:,}"
            )
        self._stepped = True

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        last, to = trainer.train_iters, self._stream or sys.stdout
        terminal = not isinstance(to, Path) and is_terminal(to)
        self._print(progress_line(record, last) if terminal else train_line(record, last, datetime.now()))
        if (count := record.get("uncounted_iterations")) is not None:
            mean = "; lm loss is the mean of the others" * (count < record["iterations"])
            self._print(
                f" no token counts: in {count:,} of {record['iterations']:,} iterations the loss had no label to count "
                f"(no answer of a conversation){mean}"
            )
        if (rank := record.get("slowest_rank")) is not None:
            ratio, name = record["slowest_rank_ratio"], rank_name(rank, record["slowest_rank_host"])
            self._print(f" slow rank: {name} works {ratio:.2f} x as long as the others of its stage")
        if (stage := record.get("slowest_stage")) is not None:
            ratio, hosts = record["slowest_stage_ratio"], record["slowest_stage_hosts"]
            self._print(
                f" uneven stages: pipeline rank {stage} ({hosts}) works {ratio:.2f} x as long as the others; "
                f"{evened(record, foreign=trainer.config.model.is_foreign)}"
            )

    def on_evaluation(self, trainer: TrainerView, record: Record) -> None:
        self._print(evaluation_line(record))

    def on_save(self, trainer: TrainerView, record: Record) -> None:
        self._saved = Path(record["path"]).name

    def on_samples(self, trainer: TrainerView, records: list[Record]) -> None:
        for record in records:
            prompt, text = (json.dumps(record[key], ensure_ascii=False) for key in ("prompt", "text"))
            text = "its logits are not numbers" if record["text"] is None else text
            self._print(f" sample at iteration {record['iteration']} | {prompt} -> {text} |")

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        goodput, status = summary.get("goodput"), summary["status"]
        in_order = status not in ("failed", "interrupted")  # else the last steps are not added up, nor a save finished
        share = f", {goodput:.0%} of it in training steps" if in_order and goodput is not None else ""
        how = f"stopped ({status})" if status.startswith("exit_") else status
        self._print(
            f" {how} at iteration {summary['iteration']} after {summary['wall_time_s']:.1f} s{share}"
            f"{_way_on(trainer.config, self._saved * in_order) if status != 'completed' else ''}"
        )

    def _print(self, line: str) -> None:
        if isinstance(self._stream, Path):
            self._stream.parent.mkdir(parents=True, exist_ok=True)
            with self._stream.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")
            return
        stream = self._stream or sys.stdout
        stream.write(line + "\n")
        stream.flush()


def evened(record: Record, *, foreign: bool) -> str:
    """What the measured times of uneven stages say of the division of the layers."""
    flag = flag_of("pipeline_model_parallel_layout")
    if (core := record.get("slowest_stage_core")) is not None:
        return f"it had {core:.0%} of a core meanwhile, so these times say nothing about the layers of the stages"
    if foreign:
        return f"layers of {flag_of('model_module')} are divided by counted operations; megalite.Pipeline takes `sizes`"
    if "slowest_stage_layout" not in record:
        return f"if no other program runs there, give it fewer layers by {flag}"
    if (layout := record["slowest_stage_layout"]) is None:
        return "these times show no division of the layers that is faster"
    return f"by these times a faster division of the layers is {flag} '{layout}'"


def _way_on(config: Config, saved: str) -> str:
    """Of a run that has not come to its end: the checkpoint from which it can continue. saved: the last that it wrote,
    perhaps still in the background."""
    where = config.checkpoint.save
    if where is None:
        return f"; nothing was saved (no {flag_of('save')})"
    in_store = not isinstance(place(where), Path)
    newest = max([saved, *([] if in_store else [path.name for path in committed(where)])])
    if in_store and not newest:  # which may not answer: what it holds is not asked for now
        return ""
    goes_on = f"{newest}; {flag_of('auto_resume')} continues from it"
    return f"; newest checkpoint: {goes_on if newest else 'none'}"


def progress_line(record: Record, train_iters: int) -> str:
    """The line of a `"train"` record on a terminal, at most `COLUMNS` wide; less important parts are dropped first."""
    parts = [f" iteration {record['iteration']:,} of {train_iters:,}"]
    if (loss := record.get("lm_loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if (left := record.get("eta_s")) is not None:
        parts.append(f"{duration(left)} left" if record["iteration"] < train_iters else "done")
    for key, what in (("nan_iterations", "not finite"), ("skipped_iterations", "skipped")):
        if record.get(key):
            parts.append(f"{record[key]} {what}")
    if (norm := record.get("grad_norm")) is not None:
        parts.append(f"grad norm {norm:.3g}")
    while len(" | ".join(parts)) > COLUMNS:
        parts.pop()
    return " | ".join(parts)


def train_line(record: Record, train_iters: int, now: datetime) -> str:
    """The line of a `"train"` record, e.g. ` [2026-01-01 00:00:00.000000] iteration 1/ 10 | consumed samples: ...`."""
    parts = [f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {record['iteration']:8d}/{train_iters:8d}"]
    for name, key, spec, _ in _FIELDS:
        if (value := record.get(key)) is not None:
            parts.append(f"{name}: {format(100 * value if '(%)' in name else value, spec)}")
    parts += [f"{name}: {loss:.6E}" for name, loss in _beside(record).items()]
    if (left := record.get("eta_s")) is not None:
        parts.append(f"ETA: {duration(left)}")
    return " | ".join(parts) + " |"


def _beside(record: Record) -> dict[str, float]:
    """Losses of the parts of a blend, and of the tokens beyond the next one, by their names in a line."""
    found = {f"lm loss of {name}": loss for name, loss in record.get("lm_loss_by_part", {}).items()}
    found |= {f"{key[:-5]} loss": record[key] for key in record if key.startswith("mtp_") and key.endswith("_loss")}
    return {name: loss for name, loss in found.items() if loss is not None}


def evaluation_line(record: Record) -> str:
    """The line of a `"valid"`, `"test"` (Megatron-LM's `lm loss value`, `lm loss PPL`) or `"task"` record."""
    if record["kind"] == "task":
        parts = [f" task {record['task']} at iteration {record['iteration']}"]
        parts += [f"{name}: {value:.4f}" for name, value in _measures(record).items()]
        return " | ".join(parts) + " |"
    parts = [f" {_split(record)} loss at iteration {record['iteration']}"]
    parts += [f"{name}: {format(record[key], spec)}" for name, key, spec, _ in _EVALUATED if key in record]
    return " | ".join(parts) + " |"


def tags(record: Record) -> dict[str, float]:
    """The numbers of a `"train"`, `"valid"` or `"test"` record by tag; what does not exist is left out."""
    if record["kind"] == "train":
        named = {tag: record.get(key) for _, key, _, tag in _FIELDS if tag}
        named["mem-max-allocated-bytes"] = record.get("peak_memory_bytes")
        named["iteration-time"] = 1e-3 * record["iteration_time_ms"]
        named |= _beside(record)
    elif record["kind"] == "task":
        named = {f"task {record['task']} {name}": value for name, value in _measures(record).items()}
    else:
        named = {tag.format(_split(record)): record.get(key) for _, key, _, tag in _EVALUATED}
    return {tag: float(value) for tag, value in named.items() if value is not None}


def _measures(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in ("kind", "iteration", "task")}


def _split(record: Record) -> str:
    """Megatron-LM's name of the data that was evaluated."""
    kind = "validation" if record["kind"] == "valid" else str(record["kind"])
    return f"{kind} {record['set']}" if "set" in record else kind


class TensorBoardHook(Hook):
    """Writes TensorBoard events; losses also over samples, as `lm loss vs samples`. directory: of the event files; a
    resumed run writes a further file into it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def on_start(self, trainer: TrainerView) -> None:
        tensorboard = optional_package(f"`tensorboard_dir`={self._directory}", "torch.utils.tensorboard", "tensorboard")
        _hide_tensorboards_threads()
        self._writer: Any = tensorboard.SummaryWriter(log_dir=self._directory)
        self._writer.add_scalar("world-size", trainer.mesh.size("world"), trainer.iteration)

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        self._writer.close()

    def on_losses(self, trainer: TrainerView, record: Record) -> None:
        for tag, value in tags(record).items():
            self._writer.add_scalar(tag, value, record["iteration"])
            if "lm loss" in tag:
                self._writer.add_scalar(f"{tag} vs samples", value, trainer.consumed_samples)
        self._writer.flush()

    def on_samples(self, trainer: TrainerView, records: list[Record]) -> None:
        for number, record in enumerate(records):
            self._writer.add_text(f"sample {number}", f"{record['prompt']}**{record['text']}**", record["iteration"])
        self._writer.flush()


def _hide_tensorboards_threads() -> None:
    """No traceback where one of them ends: the writer's next call raises the same error again."""
    others = threading.excepthook

    def hook(what: threading.ExceptHookArgs) -> None:
        if type(what.thread).__module__.partition(".")[0] != "tensorboard":
            others(what)

    threading.excepthook = hook


class WandbHook(Hook):
    """Logs to Weights & Biases: in the user's mode, or online where a key is found, else offline for `wandb sync`."""

    def on_start(self, trainer: TrainerView) -> None:
        options, save = trainer.config.logging.wandb, trainer.config.checkpoint.run_folder
        self._library = wandb = optional_package(f"`wandb_project`={options.wandb_project}", "wandb")
        directory = options.wandb_save_dir or save
        self._directory = directory or "."
        Path(self._directory).mkdir(parents=True, exist_ok=True)
        self._stop_if_full()
        # The library knows the user's mode and where keys may stand; online without a key, its init asks or fails.
        mode: Any = wandb.setup().settings.mode
        if mode == "online" and not _has_key(wandb):
            mode = "offline"
            logger.warning("wandb: no key found, logging offline; `wandb sync` sends it later")
        self._run: Any = wandb.init(
            project=options.wandb_project,
            entity=options.wandb_entity,
            name=options.wandb_exp_name or (Path(save).name if save else None),
            dir=directory,
            mode=mode,
            config=to_dict(trainer.config),
        )

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        self._run.summary["status"] = summary["status"]
        self._run.finish(exit_code=1 if summary["status"] == "failed" else 0)

    def on_losses(self, trainer: TrainerView, record: Record) -> None:
        samples = {"consumed-samples": trainer.consumed_samples}
        self._run.log(tags(record) | samples, step=record["iteration"])
        self._stop_if_full()

    def on_samples(self, trainer: TrainerView, records: list[Record]) -> None:
        table = self._library.Table(["prompt", "text"], [[record["prompt"], record["text"]] for record in records])
        self._run.log({"samples": table}, step=records[0]["iteration"])

    def _stop_if_full(self) -> None:
        """wandb loses data on a full disk without a word, but for a traceback for each line of its own log."""
        if shutil.disk_usage(self._directory).free:
            return
        for handler in logging.getLogger("wandb").handlers:
            handler.handleError = lambda record: None  # type: ignore[method-assign]  # as `logging` means it
        raise DataError(f"no space left under {self._directory}; what was logged last may be lost")


def _has_key(wandb: Any) -> bool:
    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return bool(wandb.api.api_key)  # versions of wandb whose login always asks
