"""Turn checkpoints of megalite, Hugging Face models and checkpoints of Megatron-LM into one another.

    python tools/convert_checkpoint.py --from megalite --to hf --load runs/a --save exports/a --dtype bf16 --verify
    python tools/convert_checkpoint.py --from hf --to megalite --load models/llama --save runs/start
    python pretrain_gpt.py --load runs/start --finetune ...

    python tools/convert_checkpoint.py --from megalite --to hf --load runs/lora --save exports/merged --verify
    python tools/convert_checkpoint.py --from megalite --to peft --load runs/lora --save exports/adapter

    python tools/convert_checkpoint.py --from megatron --to megalite --load megatron/a --save runs/start --trust-pickle
    python tools/convert_checkpoint.py --from hf --to megatron --load models/llama --save megatron/b
        --target-tensor-model-parallel-size 4 --target-pipeline-model-parallel-size 2

Runs on a CPU in one process, with the memory of one layer, one shard or one rank's file. --verify compares the logits
of both sides, and needs the package transformers and room for both models in fp32. Megatron-LM's files are pickles:
they are opened only with --trust-pickle, in a process of their own, which calls nothing but what rebuilds tensors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import ToolParser, run_tool, stored
from compare_logits import verify
from megalite.errors import CheckpointError, ConfigError
from megalite.extras import optional_package
from megalite.files import served_url
from megalite.progress import OnProgress, ProgressBar
from megalite.strangers import check_model_folder

if TYPE_CHECKING:  # torch comes with what the functions import: not before the flags are known to be right
    import torch

    from megalite.config import ModelConfig
    from megalite.convert import AdaptedSource, KeptState, ModelSource, TrainedRun

TARGET_SIDES = ("hf", "megalite", "megatron", "dcp", "peft")
SIDES = (*TARGET_SIDES[:-1], "deepspeed")
TORCHS = ("dcp", "deepspeed")
PICKLED = {"megatron": "Megatron-LM's", "dcp": "torch.distributed's", "deepspeed": "DeepSpeed's"}
# Arguments of write_megatron -> flags.
TARGETS = {
    "tensor_parallel": "target_tensor_model_parallel_size",
    "pipeline_parallel": "target_pipeline_model_parallel_size",
    "expert_parallel": "target_expert_model_parallel_size",
    "expert_tensor_parallel": "target_expert_tensor_parallel_size",
    "implementation": "target_transformer_impl",
}
# Those of megalite.convert.megatron_names.
IMPLEMENTATIONS = ("transformer_engine", "local", "legacy")
# Their names in torch.
DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags. Raises ConfigError."""
    parser = ToolParser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--from", required=True, choices=SIDES, dest="source", help="what --load is")
    parser.add_argument("--to", required=True, choices=TARGET_SIDES, dest="target", help="what --save becomes")
    parser.add_argument(
        "--load", required=True, metavar="DIR", type=stored, help="run, checkpoint or Hugging Face model"
    )
    parser.add_argument("--save", required=True, metavar="DIR", help="new or empty directory")
    parser.add_argument(
        "--base", metavar="DIR", help="of adapters: where the model that they were trained beside lies now"
    )
    parser.add_argument(
        "--base-hub-id", metavar="ORG/NAME",
        help="to hf, peft: name on the Hub of the model that was trained further; unset: known of one from Hugging "
        "Face's cache",
    )  # fmt: skip
    parser.add_argument(
        "--model-config", metavar="FILE",
        help="from dcp, deepspeed: a config.json of Hugging Face's, which says what model it is; unset: that in --load",
    )  # fmt: skip
    parser.add_argument("--ckpt-step", type=int, help="iteration to load; unset: the newest")
    parser.add_argument(
        "--use-ema", action="store_true", help="from megalite: the average of the weights of a run with --ema-decay"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of what is written; unset: as stored, or as the base is"
    )
    parser.add_argument("--verify", action="store_true", help="compare the logits of both sides (needs transformers)")
    group = parser.add_argument_group("Megatron-LM")
    group.add_argument("--trust-pickle", action="store_true", help="open pickles (megatron, dcp, deepspeed) safely")
    group.add_argument(
        "--true-vocab-size", type=int, help="from megatron: tokens without padding; unset: as stated, or all"
    )
    group.add_argument(
        "--no-load-optim", action="store_true",
        help="from torch_dist, dcp, deepspeed, and to torch_dist: the weights alone, without the run's moments",
    )  # fmt: skip
    group.add_argument(
        "--ckpt-format", choices=("torch", "torch_dist"),
        help="to megatron: torch (unset), for the ranks of the sizes below, or torch_dist, for any layout",
    )  # fmt: skip
    group.add_argument("--target-tensor-model-parallel-size", type=int, help="to megatron: ranks of a layer; unset: 1")
    group.add_argument("--target-pipeline-model-parallel-size", type=int, help="to megatron: stages; unset: 1")
    group.add_argument("--target-expert-model-parallel-size", type=int, help="to megatron: ranks of experts; unset: 1")
    group.add_argument(
        "--target-expert-tensor-parallel-size", type=int,
        help="to megatron: ranks of an expert, 1 or as many as of a layer (unset)",
    )  # fmt: skip
    group.add_argument(
        "--target-transformer-impl", choices=IMPLEMENTATIONS,
        help="to megatron: names of megatron.core with Transformer Engine (unset), without, or from before it",
    )  # fmt: skip
    flags = parser.parse_args(argv)
    _check(flags)
    return flags


def _check(flags: argparse.Namespace) -> None:
    """Raises ConfigError for flags that do not belong together."""
    source, target, moments = flags.source, flags.target, not flags.no_load_optim
    dist, ours = flags.ckpt_format == "torch_dist", source == "megalite"
    step = (
        "name the step's folder in --load; drop it"
        if source in TORCHS
        else "a Hugging Face model has no steps; drop it"
    )
    sizes = [name for key, name in TARGETS.items() if key not in ("implementation", "expert_parallel")]
    kinds = "only from megatron, dcp or deepspeed to megalite, or from megalite to torch_dist; drop it"
    takes_moments = (source in PICKLED and target == "megalite") or (ours and dist)
    wrong = (
        (("ckpt_step",), source in ("hf", *TORCHS), step),
        (("base", "use_ema"), not ours, "only with --from megalite; drop it"),
        (("use_ema",), dist and moments, "the moments belong to the weights themselves; add --no-load-optim"),
        (("base_hub_id",), target not in ("hf", "peft"), "only with --to hf or --to peft; drop it"),
        (("verify",), {source, target} != {"hf", "megalite"}, f"compares hf with megalite, not {source} with {target}"),
        (("true_vocab_size",), source != "megatron", "only with --from megatron; drop it"),
        (("trust_pickle",), source not in PICKLED, "only with --from megatron, dcp or deepspeed; drop it"),
        (("model_config",), source not in TORCHS, "only with --from dcp or deepspeed; drop it"),
        ((*TARGETS.values(), "ckpt_format"), target != "megatron", "only with --to megatron; drop it"),
        (("no_load_optim",), not takes_moments, kinds),
        (sizes, dist, "torch_dist is loaded at any layout; drop it"),
    )
    for names, applies, what in wrong:
        for name in names if applies else ():
            if (value := getattr(flags, name)) is not None and value is not False:
                shown = "" if value is True else f"={value}"
                raise ConfigError(f"--{name.replace('_', '-')}{shown}: {what}")
    if flags.base_hub_id is not None:
        check_hub_id(flags.base_hub_id)
    if target == "peft" and not ours:
        raise ConfigError(f"--to=peft: from the adapters of a run (--from megalite), not from {source}")
    if dist and flags.target_transformer_impl == "legacy":
        raise ConfigError("--target-transformer-impl=legacy: has no torch_dist; use --ckpt-format torch")
    if source in PICKLED and not flags.trust_pickle:
        raise ConfigError(
            f"--load={flags.load}: {PICKLED[source]} checkpoints are pickles, which can carry programs; if you know "
            "where this one comes from, add --trust-pickle (another process opens it weights-only: nothing in it is "
            "executed)"
        )


def check_hub_id(name: str) -> None:
    """Raises ConfigError where a name on the Hub cannot be one, or is a folder here."""
    from megalite.convert import is_hub_id

    if not is_hub_id(name):
        shown = ascii(name[:80])[1:-1]
        raise ConfigError(f"--base-hub-id={shown}: is no name on the Hub; give ORG/NAME, as in meta-llama/Llama-3.2-1B")
    if Path(name).exists():
        raise ConfigError(
            f"--base-hub-id={name}: is a folder here, and a path is nothing to others; if the model is named so on the "
            "Hub, run this from another folder"
        )


def main(argv: list[str]) -> None:
    """Convert and report."""
    flags = parse(argv)
    load, save = Path(flags.load), Path(flags.save)
    if served_url(flags.load) is not None and (flags.source != "megalite" or flags.verify):
        raise ConfigError(f"--load={flags.load}: only --from megalite reads a store, without --verify; copy it")
    if flags.verify:
        _check_peer(flags, load)  # before the work of writing
    source = _open(flags, load)
    run, kept = _run_of(flags, source), _kept_of(flags, source)
    with ProgressBar("converting", "parameters") as bar:
        state = None if run is None else Watched(run, bar, source.model)
        written = _write(flags, Watched(source, bar, source.model), save, state, kept)
    print(f"wrote {written}")
    if flags.target == "hf" and flags.source == "megalite" and flags.dtype is None:
        whose = "the base model" if hasattr(source, "base_model") else "the checkpoint"
        stored = json.loads((save / "config.json").read_text(encoding="utf-8"))["dtype"]
        short = next((word for word, name in DTYPES.items() if name == stored), stored)
        print(f"weights written as {short}, the dtype of {whose}; --dtype chooses another")
    if run is not None:
        print(f"with the optimizer's state: a run with --load {save} continues after iteration {run.iteration:,}")
    if kept is not None:
        print(
            f"with the optimizer's state: Megatron-LM continues after iteration {kept.iteration:,} (with --no-load-rng)"
        )
    if flags.target == "megatron":
        words = _tokenizer_flags(save)
        kind = source.tokenizer.kind
        print(
            f"with the tokenizer; Megatron-LM reads it by {words}"
            if words
            else f"without a tokenizer ({flags.load} has {kind}); for Megatron-LM name that of your data"
        )
    if flags.target == "peft" and cast("AdaptedSource", source).adapted.lora.frozen_weights_int8:
        print(
            "trained beside a base in 8 bits: peft puts these beside the base as it is; --to hf merges what was trained"
        )
    if flags.target == "peft" and flags.base_hub_id is None and cast("AdaptedSource", source).base_model.hub_id is None:
        from megalite.checkpoint import is_huggingface

        at = cast("AdaptedSource", source).base_model.path
        load_it = "load the base model, then "
        if at is not None and not is_huggingface(at):
            load_it = f"export the base, a run (--from megalite --to hf --load {at}), load that, then "
        print(
            f"its base model's name on the Hub is not known, so none is written: {load_it}"
            f"PeftModel.from_pretrained(base, {str(save)!r}); AutoPeftModel needs --base-hub-id ORG/NAME"
        )
    if flags.verify:
        ours, theirs = (load, save) if flags.source == "megalite" else (save, load)
        step = flags.ckpt_step if flags.source == "megalite" else None
        base = None if flags.base is None else Path(flags.base)
        verify(ours, theirs, step, _dtype(flags), source, use_ema=flags.use_ema, base=base)


def _tokenizer_flags(folder: Path) -> str:
    """Megatron-LM's flags for the tokenizer in a folder; empty where there is none."""
    known = {
        "tokenizer.json": f"HuggingFaceTokenizer --tokenizer-model {folder}",
        "merges.txt": f"GPT2BPETokenizer --vocab-file {folder / 'vocab.json'} --merge-file {folder / 'merges.txt'}",
        "tokenizer.model": f"SentencePieceTokenizer --tokenizer-model {folder / 'tokenizer.model'}",
    }
    return next((f"--tokenizer-type {words}" for file, words in known.items() if (folder / file).is_file()), "")


def _check_peer(flags: argparse.Namespace, load: Path) -> None:
    """Raises ConfigError where transformers could not load the other side without running a stranger's program."""
    optional_package("--verify", "transformers")
    if flags.source == "hf":
        check_model_folder(load, "--load")


class Watched:
    """A `ModelSource` or `TrainedRun` that reports how much of it has been read (writers may read a tensor more than
    once)."""

    def __init__(self, source: ModelSource | TrainedRun, on_progress: OnProgress, model: ModelConfig) -> None:
        from megalite.convert import stored_shapes

        self._source, self._on_progress = source, on_progress
        self._left = {name: math.prod(shape) for name, shape in stored_shapes(model).items()}
        self._total = sum(self._left.values())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, name: str) -> Any:
        """See `ModelSource`."""
        return self._seen(name, cast("ModelSource", self._source).read(name))

    def stored(self, name: str) -> Any:
        """See `TrainedRun`."""
        return self._seen(name, cast("TrainedRun", self._source).stored(name))

    def _seen(self, name: str, values: Any) -> Any:
        self._left.pop(name, None)
        self._on_progress(self._total - sum(self._left.values()), self._total, "")
        return values


def _open(flags: argparse.Namespace, load: Path) -> ModelSource:
    from megalite.convert import AdaptedSource, DcpSource, HuggingFaceSource, open_checkpoint, open_megatron

    if flags.source in TORCHS:
        if (flags.source == "deepspeed") != (load / "zero").is_dir():
            fix = "--from dcp or megatron?" if flags.source == "deepspeed" else "it is DeepSpeed's: --from deepspeed"
            raise CheckpointError(f"--load={load}: {'holds no' if fix[0] == '-' else 'holds a'} folder zero; {fix}")
        return DcpSource(load, flags.model_config)
    if flags.source == "megatron":
        return open_megatron(load, flags.ckpt_step, true_vocab_size=flags.true_vocab_size)
    if flags.source == "hf":
        return HuggingFaceSource(load)
    base = None if flags.base is None else Path(flags.base)
    source = open_checkpoint(flags.load, flags.ckpt_step, base, _dtype(flags), use_ema=flags.use_ema)
    if flags.target == "peft" and not isinstance(source, AdaptedSource):
        raise CheckpointError(f"--load={load}: holds no adapters (it was not trained with --lora); use --to hf")
    return source


def _run_of(flags: argparse.Namespace, source: ModelSource) -> TrainedRun | None:
    """The run whose moments are taken along, if any."""
    from megalite.convert import state_of

    if flags.target != "megalite" or flags.no_load_optim:
        return None
    run = state_of(source)
    if run is not None and flags.dtype not in (None, "fp32"):
        raise ConfigError(f"--dtype={flags.dtype}: a run's masters are fp32; drop it, or add --no-load-optim")
    return run


def _kept_of(flags: argparse.Namespace, source: ModelSource) -> KeptState | None:
    """The state of a run of ours that Megatron-LM is to continue, if any."""
    from megalite.convert import CheckpointSource, KeptState

    if flags.ckpt_format != "torch_dist":
        return None
    ranks, kept = flags.target_expert_model_parallel_size, None
    if isinstance(source, CheckpointSource) and not flags.no_load_optim:
        kept = KeptState.of(source, (ranks or 1) > 1)
    if ranks is not None and (kept is None or source.model.experts.num_experts is None):
        what = "torch_dist is loaded at any layout, but for moments of a model with experts; drop it"
        raise ConfigError(f"--target-expert-model-parallel-size={ranks}: {what}")
    return kept


def _write(
    flags: argparse.Namespace, source: ModelSource, save: Path, run: TrainedRun | None, kept: KeptState | None
) -> Path:
    from megalite import convert

    dtype = _dtype(flags)
    if flags.target == "peft":
        return convert.write_peft(cast("AdaptedSource", source), save, dtype=dtype, base=flags.base_hub_id)
    if flags.target == "megatron":
        named = {key: getattr(flags, flag) for key, flag in TARGETS.items()}
        chosen = {key: value for key, value in named.items() if value is not None}
        if flags.ckpt_format == "torch_dist":
            chosen.pop("expert_parallel", None)
            return convert.write_torch_dist(source, save, dtype=dtype, run=kept, **chosen)
        return convert.write_megatron(source, save, dtype=dtype, **chosen)
    if flags.target == "dcp":
        return convert.write_dcp(source, save, dtype=dtype)
    if flags.target == "hf":
        return convert.write_huggingface(source, save, dtype=dtype, base=flags.base_hub_id)
    return convert.write_checkpoint(source, save, dtype=dtype, run=run)


def _dtype(flags: argparse.Namespace) -> torch.dtype | None:
    import torch

    return getattr(torch, DTYPES[flags.dtype]) if flags.dtype else None


if __name__ == "__main__":
    sys.exit(run_tool(main))
