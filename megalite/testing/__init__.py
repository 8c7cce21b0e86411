"""The rank harness: several ranks in a test for the price of a fork.

    pytest  --- case --->  zygote (torch imported once, never computes)
                             fork -> rank 0 --\\
                             fork -> rank 1 ---+--> results, or who failed first and why
                             ...

    def body(world: World, scale: float) -> float: ...         # a function at the top of a test module

    def test_it() -> None:
        results = run_ranks(body, 2, 0.5)                      # [result of rank 0, result of rank 1]

Public names: `run_ranks`, `run_single` (the reference: one process, no process group), `try_ranks` (for tests that
expect a failure), `Fault` (what to do at a fault point), `RanksFailed`. `oracle.py` is the single process with which
tests and tools/prove_layout.py compare layouts.

Invariant: a case leaves nothing behind, whatever its ranks did: fresh processes, own rendezvous file, own folder, all
ended at the time-out. The proof is `tests/unit/testing/test_rank_harness.py`.
"""

from megalite.testing.fault import Fault
from megalite.testing.harness import CaseResult, RanksFailed, run_ranks, run_single, try_ranks
