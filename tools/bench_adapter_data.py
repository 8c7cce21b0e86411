"""megalite's rows of the shared peer benchmarks for data (`b_index.py`, `b_token.py`).

python b_index.py --extra megalite=bench_adapter_data:index       with this folder and the project's root on PYTHONPATH
python b_token.py --extra megalite=bench_adapter_data:tokenise
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data import HuggingFaceTokenizer, build_sample_index, preprocess


def index(ctx: dict[str, Any]) -> NDArray[np.integer]:
    """Sample index `[n + 1, 2]` of shuffled documents."""
    return build_sample_index(ctx["sizes"], ctx["doc_idx"], ctx["seq"], total=ctx["total"])


def tokenise(ctx: dict[str, Any]) -> None:
    """The whole job of tools/preprocess_data.py: read JSONL, tokenise, write `.bin/.idx`."""
    tokenizer = HuggingFaceTokenizer.from_path(ctx["tokenizer_json"])
    preprocess([ctx["jsonl"]], ctx["out"], tokenizer, append_eod=True, workers=ctx["workers"])
