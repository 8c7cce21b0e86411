"""Flags of the tools beyond all bounds, and files that are none: one line before anything is loaded, status 2."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

from megalite.files import input_problem

GENERATE = "generate_text --load x"
PREPROCESS = f"preprocess_data --input {__file__} --output-prefix {{tmp}}/out"
EVALUATE = "evaluate --load x"
PROFILE = "profile_layers --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1 --train-iters 1"
COORDINATES = f"coordinate_check {PROFILE.partition(' ')[2]} --micro-batch-size 1 --mock-data --vocab-size 64"
TASKS = "evaluate_harness --load x --tasks t"

#: The tool and its flags -> how the one line begins.
LINES = [
    (f"{GENERATE} --num-samples 1000000000", "--num-samples=1000000000: must be >= 1 and <= 1,048,576"),
    (f"{GENERATE} --num-samples 0", "--num-samples=0: must be >= 1"),
    (f"{GENERATE} --num-samples 1e9", "--num-samples: invalid int value: '1e9'"),
    (f"{GENERATE} --max-new-tokens -1", "--max-new-tokens=-1: must be >= 1"),
    (f"{GENERATE} --micro-batch-size 10000000000", "--micro-batch-size=10000000000: must be >= 1 and <="),
    (f"{GENERATE} --ckpt-step -3", "--ckpt-step=-3: must be >= 0"),
    (f"{GENERATE} --temperature nan", "--temperature=nan: must be >= 0"),
    (f"{GENERATE} --temperature -1", "--temperature=-1: must be >= 0"),
    (f"{GENERATE} --top-p 0", "--top-p=0: must be above 0 and at most 1"),
    (f"{GENERATE} --top-p nan", "--top-p=nan: must be above 0 and at most 1"),
    (f"{GENERATE} --top-p 1.5", "--top-p=1.5: must be above 0 and at most 1"),
    (f"{GENERATE} --top-k -1", "--top-k=-1: must be >= 0"),
    (f"{GENERATE} --seed 99999999999999999999", "--seed=99999999999999999999: must be below 2^64"),
    (f"{GENERATE} --greedy --top-k 4", "--greedy: leaves no choice to --temperature, --top-k and --top-p"),
    (f"{GENERATE} --prompts /dev/zero", "--prompts=/dev/zero: is a pipe or a device, which not every rank can read"),
    (f"{GENERATE} --prompts {{fifo}}", "--prompts={fifo}: is a pipe or a device"),
    (f"{GENERATE} --prompts {{tmp}}", "--prompts={tmp}: is a directory; give a file"),
    (f"{GENERATE} --prompts {{tmp}}/none", "--prompts={tmp}/none: cannot be read (No such file or directory)"),
    (f"{GENERATE} --prompts {{large}}", "--prompts={large}: 68,719,476,736 bytes, at most 67,108,864; split the file"),
    (f"{GENERATE} --cp-comm-type a2a", "--cp-comm-type=a2a: has no effect at --context-parallel-size=1; drop it"),
    (f"{PREPROCESS} --workers 100000", "--workers=100000: must be >= 1 and <= "),
    (f"{PREPROCESS} --workers 0", "--workers=0: must be >= 1"),
    (f"{PREPROCESS} --workers nan", "--workers: invalid int value: 'nan'"),
    (f"{PREPROCESS} --log-interval nan", "--log-interval=nan: must be >= 0"),
    (f"{PREPROCESS} --log-interval inf", "--log-interval=inf: must be >= 0"),
    (f"{PREPROCESS} --tokenizer-type NullTokenizer --vocab-size -4", "--vocab-size=-4: must be >= 2"),
    ("preprocess_data --input /dev/zero --output-prefix {tmp}/out", "--input=/dev/zero: is a pipe or a device"),
    ("preprocess_data --input {fifo} --output-prefix {tmp}/out", "--input={fifo}: is a pipe or a device"),
    (f"{EVALUATE} --text-file /dev/zero", "--text-file=/dev/zero: is a pipe or a device"),
    (f"{EVALUATE} --text-file {{fifo}}", "--text-file={fifo}: is a pipe or a device"),
    (f"{EVALUATE} --text-file {{tmp}}", "--text-file={tmp}: is a directory; give a file"),
    (f"{EVALUATE} --text-file {__file__} --micro-batch-size 0", "--micro-batch-size=0: must be >= 1"),
    (f"{EVALUATE} --text-file {__file__} --overlap -1", "--overlap=-1: must be >= 0"),
    (f"{COORDINATES} --widths 32", "--widths=32: two or more widths and commas between them, such as 64,128,256"),
    (f"{COORDINATES} --widths 8,x", "--widths=8,x: two or more widths"),
    (
        f"{COORDINATES} --widths 8,12 --steps 0",
        "--widths=12: --num-attention-heads=1 would be 1.5; use multiples of --hidden-size=8",
    ),
    (f"{COORDINATES} --widths 8,16 --steps -1", "--steps=-1: must be >= 0"),
    (f"{COORDINATES} --widths 8,16 --steps 9", "--train-iters=1: not above --steps=9; train longer"),
    (f"{COORDINATES} --widths 8,16 --steps 0 --nprocs 2", "--nprocs=2: the widths are trained by one process; drop it"),
    (
        f"{PROFILE} --vocab-size 300 --output {{tmp}}/p.json --model-module m.py:f",
        "--model-module=m.py:f: megalite.time_layers times layers of your own",
    ),
    ("plan --num-devices 2 --memory-margin nan", "--memory-margin=nan: a part of the memory, from 0 to below 1"),
    ("plan --num-devices 2 --memory-margin 1", "--memory-margin=1: a part of the memory, from 0 to below 1"),
    (f"{TASKS} --limit 0", "--limit=0: must be >= 1"),
    (f"{TASKS} --num-fewshot -1", "--num-fewshot=-1: must be >= 0"),
    (f"{TASKS} --micro-batch-size 0", "--micro-batch-size=0: must be >= 1"),
    ("train_tokenizer --input /dev/zero --output {tmp}/t --vocab-size 300", "--input=/dev/zero: no such file"),
    ("train_tokenizer --input {tmp} --output {tmp}/t --vocab-size 1", "--vocab-size=1: must be at least 2"),
    (f"{PROFILE} --vocab-size 9 --output {{tmp}}/p.json --num-processes 0", "--num-processes=0: must be >= 1"),
    (f"{PROFILE} --vocab-size 9 --output {{tmp}}/p.json --num-processes 10000000", "--num-processes=10000000: must be"),
    (f"{PROFILE} --vocab-size 9 --output {{tmp}}/p.json --repeats 0", "--repeats=0: must be >= 1"),
    (f"{PROFILE} --vocab-size 9 --output {{tmp}}/p.json --micro-batches 1,x", "--micro-batches=1,x: sizes above 0"),
    (f"{PROFILE} --vocab-size 9 --output {{tmp}}/p.json --micro-batches 0", "--micro-batches=0: sizes above 0"),
    (f"{PROFILE} --vocab-size 9 --output {{tmp}}/none/p.json", "--output={tmp}/none/p.json: cannot be written"),
    (f"{PROFILE} --vocab-size 9 --output {{tmp}}", "--output={tmp}: cannot be written"),
    (f"{PROFILE} --output {{tmp}}/p.json", "--vocab-size: not given, and no tokenizer.json is named"),
    (f"{PROFILE} --vocab-size 9", "the following arguments are required: --output"),
    (f"{PROFILE} --vocab-size 9 --output {{tmp}}/p.json --repeats many", "--repeats: invalid int value: 'many'"),
    ("check_plan --layouts 0", "--layouts=0: must be >= 1"),
    ("check_plan --num-devices x", "--num-devices: invalid int value: 'x'"),
    ("check_plan --patience nan", "--patience=nan: must be >= 0"),
    ("compare_published --source nowhere", "--source: invalid choice: 'nowhere'"),
    ("show_schedule --schedule 1f1b --num-batches 0", "--num-batches=0: must be >= 1"),
    ("show_schedule --schedule 1f1b --num-batches 1000000000", "--num-batches=1000000000: must be >= 1 and <="),
    ("show_schedule --schedule decode --num-batches 1000000000", "--num-batches=1000000000: must be >= 1 and <="),
    ("show_schedule --schedule 1f1b --weight-capacity 0", "--weight-capacity=0: at least 1"),
    (
        "show_schedule --schedule 1f1b --weight-capacity 2 --layers-per-stage 1000000000",
        "--layers-per-stage=1000000000: at most 16384",
    ),
    ("show_schedule --pipeline-schedule-file /dev/zero", "--pipeline-schedule-file=/dev/zero: is a pipe or a device"),
    ("show_schedule --pipeline-schedule-file {fifo}", "--pipeline-schedule-file={fifo}: is a pipe or a device"),
    ("prove_layout --steps 1000000000", "--steps=1000000000: must be >="),
    ("prove_layout --max-ranks 0", "--max-ranks=0: must be >= 1"),
    ("prove_layout --preflight 0", "--preflight=0: must be >= 1"),
    ("replay --load {tmp} --iteration 0", "--iteration=0: must be >= 1"),
    ("replay --load {tmp} --iteration 1 --documents 1000000000", "--documents=1000000000: must be >= 1 and <="),
    ("inspect_checkpoint hdfs://host/run", "DIR=hdfs://host/run: is a URL, and no store of megalite serves"),
    ("report --load {tmp} gs://bucket/run", "--load=gs://bucket/run: is a URL, and this takes a path;"),
    ("merge_datasets --input a --output-prefix file:///b", "--output-prefix=file:///b: is a URL; give the path, /b"),
    ("prove_layout --keep hdfs://host/x --config a", "--keep=hdfs://host/x: is a URL, and "),
    ("plan --num-devices 1000000000", "--num-devices=1000000000: at most"),
    ("plan --num-devices 2 --top 0", "--num-devices=2 --top=0: both must be 1 or more"),
]


@pytest.mark.parametrize(("words", "begin"), LINES, ids=[row[0] for row in LINES])
def test_one_line_and_status_2(words: str, begin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fifo, large = tmp_path / "fifo", tmp_path / "large"
    os.mkfifo(fifo)
    with large.open("wb") as file:
        file.truncate(1 << 36)
    names = {"tmp": tmp_path, "fifo": fifo, "large": large}
    tool, *argv = words.format(**names).split()
    module = importlib.import_module(tool)
    run = (
        (lambda: module.main(argv))
        if tool in OWN
        else lambda: importlib.import_module("command_line").run_tool(module.main, argv)
    )
    assert run() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: " + begin.format(**names))


#: Tools whose `main` catches its errors itself.
OWN = (
    "profile_layers",
    "coordinate_check",
    "check_plan",
    "compare_published",
    "show_schedule",
    "prove_layout",
    "replay",
    "plan",
)


def test_flags_are_judged_before_torch_is_imported() -> None:
    tools = "generate_text", "evaluate", "evaluate_harness", "preprocess_data"
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tools')!r}]\n"
        "from command_line import run_tool\nimport " + ", ".join(tools) + "\n"
        "bad = ['--temperature', '-1'], [], ['--tasks', 't', '--limit', '0'], []\n"
        f"for tool, argv in zip(({', '.join(tools)}), bad, strict=True):\n"
        "    assert run_tool(tool.main, ['--load', 'x', *argv]) == 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("limit", [300, 500], ids=["torch is not mapped", "OpenBLAS has no room"])
def test_an_address_space_without_room_for_torch_is_named(limit: int) -> None:
    words = f"ulimit -v {limit * 1000}; exec {sys.executable} pretrain_gpt.py --num-layers 1"
    found = subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, text=True)
    (line,) = found.stderr.splitlines()
    assert found.returncode == 2 and line.startswith(
        f"error: ulimit -v: {limit * 1000:,} KiB, in which torch cannot start ("
    )


def test_what_is_a_file_for_every_rank(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert input_problem(str(tmp_path / "a")) is input_problem(str(tmp_path / "link")) is None
    assert input_problem(str(tmp_path / "a"), 1) is None and input_problem(str(tmp_path / "a"), 0) is not None
    for name in ("/dev/null", "/dev/tty0", str(tmp_path / "loop"), "a\0b", "", str(tmp_path / ("n" * 300))):
        assert input_problem(name) is not None


def test_layers_are_timed_without_a_learning_rate(tmp_path: Path) -> None:
    from profile_layers import settings

    argv = f"{PROFILE} --vocab-size 300 --output {tmp_path / 'p.json'}".replace("--lr 1 ", "").split()[1:]
    assert settings(argv)[2] == [1, 2, 4]
