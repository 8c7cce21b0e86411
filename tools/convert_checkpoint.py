"""Turn a checkpoint into a Hugging Face model, or a Hugging Face model into a checkpoint.

    python tools/convert_checkpoint.py --from megalite --to hf --load runs/a --save exports/a --dtype bf16 --verify
    python tools/convert_checkpoint.py --from hf --to megalite --load models/llama --save runs/start
    python pretrain_gpt.py --load runs/start --finetune ...

Runs on a CPU in one process, with the memory of one layer or one shard. --verify compares the logits of both sides, and
needs the package transformers and room for both models in fp32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

import torch

from megalite.convert import CheckpointSource, HuggingFaceSource, write_checkpoint, write_huggingface
from megalite.errors import ConfigError, RuntimeFailure
from megalite.microbatch import Microbatch
from megalite.training.loading import load_for_inference
from megalite.training.tool import ToolParser, run_tool

# A difference above this share of the largest logit is no rounding: both sides compute in fp32 or wider.
TOLERANCE = 1e-3
TOKENS = 64
SIDES = ("hf", "megalite")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags. Raises ConfigError."""
    parser = ToolParser("Turn a checkpoint into a Hugging Face model, or a Hugging Face model into a checkpoint.")
    parser.add_argument("--from", required=True, choices=SIDES, dest="source", help="what --load is")
    parser.add_argument("--to", required=True, choices=SIDES, dest="target", help="what --save becomes")
    parser.add_argument("--load", required=True, metavar="DIR", help="run directory, checkpoint or Hugging Face model")
    parser.add_argument("--save", required=True, metavar="DIR", help="new or empty directory")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load; unset: the newest")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the written weights; unset: as they are stored")
    parser.add_argument("--verify", action="store_true", help="compare the logits of both sides (needs transformers)")
    flags = parser.parse_args(argv)
    if flags.ckpt_step is not None and flags.source == "hf":
        raise ConfigError(f"--ckpt-step={flags.ckpt_step}: a Hugging Face model has no steps; drop it")
    if flags.verify and flags.source == flags.target:
        raise ConfigError(f"--verify: compares hf with megalite; both sides are {flags.source}")
    return flags


def main(argv: list[str]) -> None:
    """Convert and report."""
    flags = parse(argv)
    load, save = Path(flags.load), Path(flags.save)
    source = HuggingFaceSource(load) if flags.source == "hf" else CheckpointSource(load, flags.ckpt_step)
    write = write_huggingface if flags.target == "hf" else write_checkpoint
    written = write(source, save, dtype=DTYPES.get(flags.dtype))
    print(f"wrote {written}")
    if flags.verify:
        ours, theirs = (load, save) if flags.source == "megalite" else (save, load)
        verify(ours, theirs, flags.ckpt_step if flags.source == "megalite" else None)


def verify(ours: Path, theirs: Path, ckpt_step: int | None) -> None:
    """Compare the logits of random tokens. Raises RuntimeFailure where they differ by more than rounding."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("--verify: needs the package transformers; pip install transformers") from None
    loaded = load_for_inference(ours, ckpt_step=ckpt_step, device="cpu")
    model = loaded.config.model
    length = min(TOKENS, model.max_positions)
    tokens = torch.randint(0, model.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    batch = Microbatch(
        tokens=tokens,
        labels=tokens,
        positions=torch.arange(length)[None],
        loss_mask=torch.ones(1, length),
        sample_ids=torch.zeros(1, dtype=torch.int64),
    )
    with torch.no_grad():
        head = loaded.model.get_submodule("head")
        logits = head.logits(loaded.model.body(None, batch)).transpose(0, 1)  # type: ignore[operator]
        dtype = next(loaded.model.parameters()).dtype
        peer = transformers.AutoModelForCausalLM.from_pretrained(theirs, local_files_only=True, dtype=dtype).eval()
        expected = peer(input_ids=tokens).logits
    largest, difference = expected.abs().max().item(), (logits - expected).abs().max().item()
    print(f"verify: largest difference of logits {difference:.3g}, largest logit {largest:.3g} ({dtype})")
    if not difference <= TOLERANCE * max(largest, 1.0):
        raise RuntimeFailure(f"--verify: logits differ by {difference:.3g}: the two models are not the same")


if __name__ == "__main__":
    sys.exit(run_tool(main))
