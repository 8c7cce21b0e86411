"""Join several `.bin/.idx` pairs into one, in the given order.

python tools/merge_datasets.py --input data/part1_text_document data/part2_text_document --output-prefix
data/all_text_document

`--input` may also be one folder: all pairs in it, sorted by name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import ToolParser, run_tool
from megalite.data import IndexedDataset, IndexedWriter, check_joined, is_indexed, note_joined, strip_suffix
from megalite.errors import DataError
from megalite.progress import ProgressBar


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags. Raises ConfigError."""
    parser = ToolParser("Join several .bin/.idx pairs into one.")
    parser.add_argument("--input", nargs="+", required=True, metavar="PREFIX", help="prefixes, or one folder of pairs")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    return parser.parse_args(argv)


def prefixes_of(inputs: list[str]) -> list[str]:
    """The prefixes that `--input` names. Raises DataError."""
    if len(inputs) == 1 and Path(inputs[0]).is_dir() and not is_indexed(inputs[0]):
        found = sorted(str(path)[:-4] for path in Path(inputs[0]).glob("*.idx") if is_indexed(str(path)[:-4]))
        if not found:
            raise DataError(f"--input={inputs[0]}: the folder holds no .bin/.idx pair; name the prefixes")
        return found
    return [strip_suffix(path) for path in inputs]


def main(argv: list[str]) -> None:
    """Raises MegaliteError."""
    args = parse(argv)
    prefixes, output = prefixes_of(args.input), strip_suffix(args.output_prefix)
    if Path(output).resolve() in [Path(prefix).resolve() for prefix in prefixes]:
        raise DataError(f"--output-prefix={output}: is one of the inputs; name another file")
    parts = [IndexedDataset(prefix, flag="--input") for prefix in prefixes]
    marked = [part.prefix for part in parts if part.marks is not None]
    if marked:
        raise DataError(f"--input={marked[0]}: is of --data-format chat, which is not merged; blend it by --data-path")
    for part in parts[1:]:
        if part.dtype != parts[0].dtype:
            raise DataError(
                f"--input={part.prefix}: holds {part.dtype.name} tokens, {parts[0].prefix} {parts[0].dtype.name}; "
                "merge only what one tokenizer wrote"
            )
    check_joined(prefixes)
    total = sum(int(part.lengths.sum(dtype="int64")) for part in parts)
    with ProgressBar("merging", "tokens") as bar, IndexedWriter(output, dtype=parts[0].dtype) as writer:
        for part in parts:
            writer.append(part, lambda: bar(writer.tokens, total))
    note_joined(output, prefixes)
    print(f"wrote {output}.bin and .idx: {writer.tokens:,} tokens of {len(parts)} data sets")


if __name__ == "__main__":
    sys.exit(run_tool(main))
