"""Let a checkpoint continue prompts, on one process or many ranks.

    python tools/generate_text.py --load DIR --prompt "def " --max-new-tokens 200 --temperature 0.7 --top-k 40 --seed 1
    python tools/generate_text.py --load DIR --prompts FILE.jsonl --micro-batch-size 8 --nprocs 4
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    python tools/generate_text.py --load models/chat --chat --prompt "Who are you?"
    python tools/generate_text.py --load models/chat --chat

DIR is a run directory or one checkpoint in it, written at any layout; nothing else of the run is needed. It may be a
Hugging Face folder too. FILE has a
field `prompt` in each line, or is text with a prompt in each; for each a line with `prompt`, `sample` and `text` is
printed. The text does not depend on the layout.

With --chat a prompt is what a user says, written by the model's own chat template; lines of FILE may have a
conversation, `messages`. Without a prompt, lines of standard input are answered one after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import MOST, ToolParser, check_file, check_numbers, run_tool
from generate_chat import Printer, answer, given_sampling
from layout_flags import add_layout_flags, add_model_flags, loaded_model, run_on_ranks, tell_front
from megalite.config import Sampling
from megalite.errors import ConfigError

if TYPE_CHECKING:
    from megalite.comm import World


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags. Raises ConfigError."""
    parser = ToolParser("Let a checkpoint continue prompts.")
    add_model_flags(parser)
    parser.add_argument("--prompt", default="", help="text to continue; empty: the beginning of a document")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL file with a field 'prompt', or a prompt in each line")
    parser.add_argument(
        "--chat", action="store_true",
        help="answer as the model's chat template has it, with the sampling of its generation_config.json; without a "
        "prompt: what is typed",
    )  # fmt: skip
    parser.add_argument(
        "--system", metavar="TEXT", help="of --chat: the system's message that conversations begin with"
    )
    parser.add_argument("--max-new-tokens", type=int, default=100, help="tokens to generate at most")
    parser.add_argument("--num-samples", type=int, default=1, help="continuations, with seeds --seed, --seed + 1, ...")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="texts that go through the model together")
    parser.add_argument("--greedy", action="store_true", help="always the most likely token")
    parser.add_argument(
        "--temperature",
        type=float,
        help="below 1: safer, above 1: wilder, 0: --greedy; unset: 1, or (--chat) the model's",
    )
    parser.add_argument(
        "--top-k", type=int, help="choose among the k most likely tokens, 0: all; unset: all, or (--chat) the model's"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        help="choose among the tokens that reach this probability; unset: all, or (--chat) the model's",
    )
    parser.add_argument("--seed", type=int, default=1234, help="of the choices")
    add_layout_flags(parser)
    flags = parser.parse_args(argv)
    check_numbers(
        flags, max_new_tokens=(1, 1 << 30), num_samples=(1, 1 << 20), micro_batch_size=(1, 1 << 20), ckpt_step=(0, MOST)
    )
    _sampling(flags, flags.seed + flags.num_samples - 1)  # a seed that is too large is no news for the last sample
    flags.sampling = _sampling(flags, flags.seed)
    check_file("--prompts", flags.prompts, 1 << 26)
    if flags.system is not None and not flags.chat:
        raise ConfigError(f"--system={flags.system}: belongs to --chat; add that")
    if flags.chat and not flags.prompt and flags.prompts is None and flags.num_samples > 1:
        raise ConfigError(
            f"--num-samples={flags.num_samples}: what is typed has one answer; give --prompt or --prompts"
        )
    if flags.prompts is not None and flags.prompt:
        raise ConfigError(f"--prompt={flags.prompt}: not with --prompts; put it into the file")
    return flags


def _sampling(flags: argparse.Namespace, seed: int) -> Sampling:
    """Raises ConfigError."""
    return Sampling(**given_sampling(flags), seed=seed)


def main(argv: list[str]) -> int:
    """Start the ranks."""
    return run_on_ranks(continue_prompts, parse(argv))


def continue_prompts(flags: argparse.Namespace, world: World) -> None:
    """Every rank: load, generate; the first prints."""
    from megalite.generation import (  # torch comes with it: not before the flags are known to be right
        prompt_ids,
        read_prompts,
    )
    from megalite.inference import generate

    world.report_phase("loading")
    loaded = loaded_model(flags, world)
    world.report_phase("generating")
    tokenizer = loaded.tokenizer
    if flags.chat:
        answer(flags, world, loaded)
        return
    texts = [flags.prompt] if flags.prompts is None else read_prompts(flags.prompts, "--prompts")
    prompts = prompt_ids(tokenizer, texts, "--prompt" if flags.prompts is None else "--prompts", loaded.front)
    tell_front(loaded, world)
    at_once = world.is_first and len(texts) == flags.num_samples == 1 and flags.prompts is None
    printer = Printer(tokenizer)
    if at_once:
        print(flags.prompt, end="", flush=True)
    found = generate(
        loaded,
        prompts,
        flags.sampling,
        max_new_tokens=flags.max_new_tokens,
        num_samples=flags.num_samples,
        micro_batch_size=flags.micro_batch_size,
        on_tokens=printer if at_once else lambda request, tokens: None,
    )
    if at_once:
        printer.end()
    elif world.is_first and flags.prompts is None:
        print("\n---\n".join(flags.prompt + tokenizer.decode(ids) for ids in found[0]))
    elif world.is_first:
        for text, samples in zip(texts, found, strict=True):
            for number, ids in enumerate(samples):
                print(json.dumps({"prompt": text, "sample": number, "text": tokenizer.decode(ids)}, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(run_tool(main))
