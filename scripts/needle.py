"""A needle in packed documents: learned within a document, and never seen from another one.

    python scripts/needle.py                                      # s = 2,048, context-parallel sizes 1, 2 and 4
    python scripts/needle.py --seq-length 128 --sizes 1 2 --steps 80

Every document hides one of 16 needles among filler and asks for it several times, `? needle`. A small llama
learns to answer from documents packed into samples of `--seq-length` tokens with `--reset-attention-mask`. Printed:
how far the losses of the context-parallel sizes are apart; how often the answer is right for a needle of the question's
own document; and how often for the only needle of a sample that stands in another document, with the mask (chance is
1/16) and with the mask off, where the same model reads it at once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a clone works without being installed

FILLER, NEEDLES, QUESTION, VOCABULARY = 1, 16, 17, 19  # filler 0, needles 1 .. 16, end of document 18
QUESTIONS = 6
FLAGS = (
    "--model-type llama --num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 "
    "--init-method-std 0.2 --micro-batch-size 4 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant "
    "--lr-warmup iters=5 --fp64 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 2 --eval-iters 0 "
    "--split 1,0,0 --reset-attention-mask --log-interval 1 --num-workers 0"
).split()


def document(length: int, rng: Any, *, needle: int | None) -> list[int]:
    """`length` tokens: filler, the needle (or none) in the first half, `QUESTIONS` times `? needle` in the second."""
    ids = [0] * length
    half, gap = length // 2, (length - 1) // 2 // QUESTIONS
    if needle is not None:
        ids[int(rng.integers(0, half))] = needle
    for number in range(QUESTIONS):
        at = half + number * gap
        ids[at : at + 2] = [QUESTION, 0 if needle is None else needle]
    return [*ids, VOCABULARY - 1]


def write_documents(prefix: Path, number: int, seq_length: int) -> None:
    """A corpus of documents of a sixteenth to a quarter of `seq_length` tokens."""
    import numpy as np

    from megalite.data import IndexedWriter

    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, vocab_size=VOCABULARY) as writer:
        for _ in range(number):
            length = int(rng.integers(seq_length // 16, seq_length // 4))
            writer.add_document(document(length, rng, needle=FILLER + int(rng.integers(NEEDLES))))


def flags(prefix: Path, seq_length: int, steps: int) -> list[str]:
    """Of pretrain_gpt.py, but for the layout."""
    sizes = ["--seq-length", str(seq_length), "--train-iters", str(steps)]
    return [*FLAGS, *sizes, "--data-path", str(prefix), "--data-cache-path", str(prefix.parent / "cache")]


def answers(checkpoint: Path, seq_length: int) -> dict[str, float]:
    """How often a document's first question is answered right: `own` needle; the only one, in the `other` document
    before it; the same `unmasked`."""
    import numpy as np
    import torch

    from megalite.inference import load_for_inference
    from megalite.microbatch import Microbatch

    loaded, rng = load_for_inference(checkpoint, device="cpu"), np.random.default_rng(1)
    length = seq_length // 8
    needles = torch.arange(FILLER, FILLER + NEEDLES).repeat(2)
    rows = [
        [*document(length - 1, rng, needle=int(needle)), *document(length - 1, rng, needle=None)] for needle in needles
    ]
    starts = (torch.arange(2 * length) // length * length).expand(len(rows), -1)
    found = {}
    for name, begin, documents in (("own", 0, starts), ("other", length, starts), ("unmasked", length, None)):
        end = begin + (length - 1) // 2 + 1  # behind the question
        tokens = torch.tensor(rows)[:, :end]
        positions, seen = torch.arange(end).expand_as(tokens), None if documents is None else documents[:, :end]
        batch = Microbatch(tokens, tokens, positions, torch.ones(tokens.shape), torch.arange(len(rows)), seen)
        with torch.no_grad():
            head: Any = loaded.model.get_submodule("head")
            logits = head.logits(loaded.model.body(None, batch)[-1:])[0]
        answer = logits[:, FILLER : FILLER + NEEDLES].argmax(-1) + FILLER
        found[name] = float((answer == needles).double().mean())
    return found


def losses_of(run: Path) -> list[float]:
    """Of every step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["lm_loss"] for line in lines if line["kind"] == "train"]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, compares, asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-length", type=int, default=2048, help="tokens of a sample (default: 2048)")
    parser.add_argument("--steps", type=int, default=150, help="of four samples (default: 150)")
    parser.add_argument("--documents", type=int, default=1000, help="in the corpus (default: 1000)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="context-parallel (default: 1 2 4)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder, losses = Path(name), {}
        write_documents(folder / "needles", args.documents, args.seq_length)
        for size in args.sizes:
            run = folder / f"cp{size}"
            layout = ["--nprocs", str(size), "--context-parallel-size", str(size), "--save", str(run)]
            command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *layout]
            subprocess.run(
                [*command, *flags(folder / "needles", args.seq_length, args.steps)], check=True,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
            losses[size] = losses_of(run)
            apart = max(abs(a - b) for a, b in zip(losses[size], losses[args.sizes[0]], strict=True))
            first, last = losses[size][0], losses[size][-1]
            print(f"context-parallel size {size}: loss {first:.4f} -> {last:.4f}, {apart:.1e} from the first size")
            right = answers(run, args.seq_length)
            print("  right: " + ", ".join(f"{name} {share:.0%}" for name, share in right.items()), flush=True)


if __name__ == "__main__":
    main()
