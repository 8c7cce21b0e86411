"""Answers of a model that was trained for conversations: `generate_text.py --chat`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from megalite.errors import ConfigError

if TYPE_CHECKING:
    from megalite.comm import World
    from megalite.config import Sampling
    from megalite.data import ChatTemplate, Messages, Tokenizer
    from megalite.generation import Request
    from megalite.inference import LoadedModel


class Printer:
    """Prints text as soon as it is certain: a character may need several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._seen: list[int] = []
        self._shown = ""

    def __call__(self, request: Request, tokens: list[int]) -> None:
        """Takes new tokens."""
        self._seen += tokens
        text = self._tokenizer.decode(self._seen)
        if not text.endswith("\ufffd") and text.startswith(self._shown):
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text

    def end(self) -> None:
        """Prints what has remained."""
        rest = self._tokenizer.decode(self._seen)
        print(rest[len(self._shown) :] if rest.startswith(self._shown) else "")


def answer(flags: argparse.Namespace, world: World, loaded: LoadedModel) -> None:
    """Every rank: answers what the flags ask; the first prints. Raises MegaliteError."""
    from megalite.generation import check_whole, read_talks, said
    from megalite.inference import chat_prompts, chat_template, generate

    for flag in ("prompt", "system"):
        check_whole(getattr(flags, flag) or "", f"--{flag}")
    template = chat_template(loaded, "--chat")
    sampling = sampling_of(flags, world, loaded)
    begin = [] if flags.system is None else [said("system", flags.system)]
    if flags.prompts is None and not flags.prompt:
        converse(flags, world, loaded, template, sampling, begin)
        return
    alone = [[*begin, said("user", flags.prompt)]]
    talks = alone if flags.prompts is None else read_talks(flags.prompts, "--prompts", begin)
    found = generate(
        loaded,
        chat_prompts(loaded, template if world.is_first else None, talks),
        sampling,
        max_new_tokens=flags.max_new_tokens,
        num_samples=flags.num_samples,
        micro_batch_size=flags.micro_batch_size,
    )
    texts = [[loaded.tokenizer.decode(ids) for ids in samples] for samples in found]
    if world.is_first and flags.prompts is None:
        print("\n---\n".join(texts[0]))
    elif world.is_first:
        for talk, samples in zip(talks, texts, strict=True):
            for number, text in enumerate(samples):
                print(json.dumps({"messages": talk, "sample": number, "text": text}, ensure_ascii=False))


def given_sampling(flags: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of sampling."""
    how = {name: getattr(flags, name) for name in ("greedy", "temperature", "top_k", "top_p")}
    return {name: value for name, value in how.items() if value is not None and value is not False}


def sampling_of(flags: argparse.Namespace, world: World, loaded: LoadedModel) -> Sampling:
    """The flags', and where they say nothing the model's, which standard error tells."""
    from megalite.inference import model_sampling

    sampling, ignored = model_sampling(loaded, given_sampling(flags), flags.seed)
    if world.is_first:
        how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}, top-k {sampling.top_k}"
        how += "" if sampling.greedy else f", top-p {sampling.top_p:g}"
        print(f"sampling: {how}{'; not applied: ' if ignored else ''}{', '.join(ignored)}", file=sys.stderr)
    return sampling


def converse(
    flags: argparse.Namespace,
    world: World,
    loaded: LoadedModel,
    template: ChatTemplate,
    sampling: Sampling,
    begin: Messages,
) -> None:
    """Answers lines of standard input until it ends, each in the light of those before. Raises MegaliteError."""
    from megalite.generation import check_whole, said
    from megalite.inference import chat_prompts, generate

    if world.size > 1:
        raise ConfigError("--chat: what is typed is read by one process; give --prompt or --prompts to several")
    talk = list(begin)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError:
            raise ConfigError("--chat: standard input is not UTF-8; convert it") from None
        if not line:
            return
        check_whole(line, "--chat")
        if not line.strip():
            continue
        talk.append(said("user", line.rstrip("\n")))
        printer = Printer(loaded.tokenizer)
        ids = generate(
            loaded,
            chat_prompts(loaded, template, [talk]),
            sampling,
            max_new_tokens=flags.max_new_tokens,
            on_tokens=printer,
        )[0][0]
        printer.end()
        sys.stdout.flush()
        talk.append(said("assistant", loaded.tokenizer.decode(ids)))
