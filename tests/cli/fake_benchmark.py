"""A benchmark of nothing, for the tests of what the benchmarks share; a rank imports it without torch."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from pathlib import Path

from benchmarks.harness import Benchmark, Flag
from benchmarks.turns import Case, Place, Variant


def fake_cases(args: Namespace) -> list[Case]:
    return [Case(args.size, ("megalite", "peer"), (("megalite", "peer"),), {"torch": False}, work=10, unit="tokens")]


def fake_build(name: str, case: Case, place: Place) -> Variant:
    if name == "raises":
        raise ValueError("what it said\nand more")
    if name == "waits":
        Path(case.settings["pid"]).write_text(f"{os.getpid()}\n")
        time.sleep(60)
    return Variant((lambda: os._exit(3)) if name == "dies" else (lambda: None))


FLAGS = {"size": Flag("size", "large", "little")}
FAKE = Benchmark("fake", "About.", FLAGS, fake_cases, fake_build, ("megalite", "peer"))
