"""A run that is not rehearsed imports nothing of the room, and no file of the product asks whether it is rehearsed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from source_tree import ROOT, SOURCES, imports

ORDINARY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --global-batch-size 4 --lr 1e-2 "
    "--micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --eval-iters 1 --train-iters 2"
).split()
ROOM = "megalite.rehearsal"
SCRIPT = (
    "import sys, pretrain_gpt; status = pretrain_gpt.main(sys.argv[1:]); "
    f"print('status', status, 'imported', [name for name in sys.modules if name.startswith('{ROOM}')])"
)


@pytest.mark.landing
def test_an_ordinary_run_imports_nothing_of_it() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT, *ORDINARY], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.endswith("status 0 imported []\n"), run.stdout + run.stderr


def test_no_file_of_the_product_names_it() -> None:
    apart = (ROOM, "tools.rehearse", "benchmarks")
    product = {module: tree for module, tree in SOURCES.items() if not module.startswith(apart)}
    assert len(product) > 300
    named = {m for m, tree in product.items() for _, name in imports(m, tree) if name.startswith(ROOM)}
    assert named == {"megalite"}  # which offers `rehearse`, and imports it when it is used
