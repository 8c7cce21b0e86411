"""README's commands, shortened to a trial: `python scripts/readme_commands.py` prints them, one a line.

A line is EXTRA, a tab, COMMAND. EXTRA is the extra of pyproject.toml for which the command asks where only the core is
installed; `-` where it needs none. A command of README that no rule here knows is an error: what readers are told to
type has been tried. They run where README's paths mean something, beside a file corpus.jsonl.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
NONE = "-"
SHORT = "--train-iters 4 --lr-warmup iters=0 --no-full-validation --eval-iters 1"
TOKENIZER = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/tokenizer.json"


@dataclass(frozen=True)
class Rule:
    """What becomes of a command of README that holds `part`.

    replace: (pattern, text). add: appended. extra: for which it asks; if because of the flag `asks`, it is tried
    without that too. before: makes what it reads. last: it reads what later commands make. skip: another step's.
    """

    part: str
    replace: tuple[tuple[str, str], ...] = ()
    add: str = ""
    extra: str = NONE
    asks: str = ""
    before: str = ""
    last: bool = False
    skip: bool = False


OWN = (("interval 50", "interval 2"),)
# What nobody has at hand, a cluster and a corpus, becomes two ranks and the text of the Data section.
LAUNCH = (
    (r"--nnodes .* 6000", "--standalone --nproc-per-node 2"),
    ("llama_7b", "quickstart"),
    ("--tokenizer-model ", "--tokenizer-model tokenizer/"),
    ("/checkpoints/7b", "runs/7b"),
)
BLEND = ((r"\.\.\.", f"--config configs/quickstart.yaml {TOKENIZER}"), ("other_text", "corpus_text"))
CONVERT = "python tools/convert_checkpoint.py --from megalite --load runs/a"
#: The first that fits counts.
RULES = (
    Rule("scripts/", skip=True),
    Rule(".venv", skip=True),
    Rule("pip install", skip=True),
    Rule("--dry-run"),
    Rule("--save runs/a --save-interval 50 --auto-resume", OWN, SHORT),
    Rule("--save runs/a --save-interval 50", OWN, f"{SHORT} --exit-interval 2"),
    Rule("torchrun", LAUNCH, SHORT, last=True),
    Rule("--data-path 0.7", BLEND, SHORT),
    Rule("pretrain_gpt.py", add=SHORT),
    Rule("generate_text.py", (("tokens 100", "tokens 10"),)),
    Rule("evaluate.py"),
    Rule("report.py"),
    Rule("train_tokenizer.py", (("32000", "1000"),)),
    Rule("preprocess_data.py", (("workers 8", "workers 2"),)),
    Rule("--plot", extra="plot"),
    Rule("plan.py"),
    Rule("--to hf", extra="hf", asks="--verify"),
    Rule("--from hf", extra="hf", asks="--verify", before=f"{CONVERT} --to hf --save Llama-3.2-1B"),
    Rule("--from megatron", before=f"{CONVERT} --to megatron --save megatron/run"),
)


def in_readme() -> Iterator[str]:
    """Lines of README's shell blocks, put together again where they continue."""
    for block in re.findall(r"^```bash\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield shlex.join(words)


def trials() -> list[tuple[str, str]]:
    """(extra, command) for each command of README, in an order in which each finds what it reads."""
    first, last = [], []
    for line in in_readme():
        rule = next((rule for rule in RULES if rule.part in line), None)
        if rule is None:
            sys.exit(f"error: {README.name}: {line}: scripts/readme_commands.py has no rule for this command; add one")
        (last if rule.last else first).extend(shortened(rule, line))
    return first + last


def shortened(rule: Rule, line: str) -> Iterator[tuple[str, str]]:
    """The trials of one command."""
    if rule.skip:
        return
    if rule.before:
        yield NONE, rule.before
    for pattern, text in rule.replace:
        if not re.search(pattern, line):
            sys.exit(
                f"error: {README.name}: {line}: scripts/readme_commands.py looks for {pattern!r} in it; mend the rule"
            )
        line = re.sub(pattern, text, line)
    line = f"{line} {rule.add}".strip()
    yield rule.extra, line
    if rule.asks:
        yield NONE, line.replace(f" {rule.asks}", "")


if __name__ == "__main__":
    for trial in trials():
        print(*trial, sep="\t")
