"""Let a checkpoint continue a prompt.

    python tools/generate_text.py --load DIR --prompt "def " --max-new-tokens 200 --temperature 0.7 --top-k 40 --seed 1

DIR is a run directory or one checkpoint in it; nothing else of the run is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import ToolParser, run_tool
from megalite.errors import ConfigError

if TYPE_CHECKING:
    from megalite.data import Tokenizer
    from megalite.inference import Sampling


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags. Raises ConfigError."""
    parser = ToolParser("Let a checkpoint continue a prompt.")
    parser.add_argument("--load", required=True, metavar="DIR", help="run directory or checkpoint")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load; unset: the newest")
    parser.add_argument("--prompt", default="", help="text to continue; empty: the beginning of a document")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="tokens to generate at most")
    parser.add_argument("--num-samples", type=int, default=1, help="continuations, with seeds --seed, --seed + 1, ...")
    parser.add_argument("--greedy", action="store_true", help="always the most likely token")
    parser.add_argument("--temperature", type=float, default=1.0, help="below 1: safer, above 1: wilder, 0: --greedy")
    parser.add_argument("--top-k", type=int, default=0, help="choose among the k most likely tokens; 0: among all")
    parser.add_argument("--top-p", type=float, default=1.0, help="choose among the tokens that reach this probability")
    parser.add_argument("--seed", type=int, default=1234, help="of the choices")
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: cuda if there is a GPU"
    )
    flags = parser.parse_args(argv)
    for name in ("max_new_tokens", "num_samples"):
        if getattr(flags, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(flags, name)}: must be >= 1")
    return flags


def main(argv: list[str]) -> None:
    """Print the prompt and its continuations as they are generated."""
    flags = parse(argv)
    from megalite.inference import (
        generate,  # torch comes with it: not before the flags are known to be right
        load_for_inference,
    )

    sampling_of(flags, flags.num_samples - 1)  # a seed that is too large is no news for the last sample
    loaded = load_for_inference(flags.load, ckpt_step=flags.ckpt_step, device=flags.device)
    tokenizer = loaded.tokenizer
    prompt = tokenizer.encode(flags.prompt)
    if not prompt:
        if tokenizer.eod_id is None:
            raise ConfigError("--prompt: is empty, and this tokenizer has no end-of-document token to begin after")
        prompt = [tokenizer.eod_id]
    for number in range(flags.num_samples):
        sampling = sampling_of(flags, number)
        if number:
            print("\n---")
        ids = generate(
            loaded.model,
            prompt,
            sampling,
            max_new_tokens=flags.max_new_tokens,
            eod_id=tokenizer.eod_id,
            num_choices=tokenizer.vocab_size,
        )
        print(flags.prompt, end="", flush=True)
        for piece in text_pieces(tokenizer, ids):
            print(piece, end="", flush=True)
        print()


def sampling_of(flags: argparse.Namespace, number: int) -> Sampling:
    """How sample `number` is drawn. Raises ConfigError."""
    from megalite.inference import Sampling

    return Sampling(
        greedy=flags.greedy,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        seed=flags.seed + number,
    )


def text_pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text as soon as it is certain: a character may need several tokens."""
    seen: list[int] = []
    shown = ""
    for token in ids:
        seen.append(token)
        text = tokenizer.decode(seen)
        if not text.endswith("\ufffd") and text.startswith(shown):
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(seen)
    if rest.startswith(shown):
        yield rest[len(shown) :]


if __name__ == "__main__":
    sys.exit(run_tool(main))
