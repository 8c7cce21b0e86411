"""Are these numbers right? The certificate of a configuration, the preflight of a cluster, the replay of an iteration.

::

    prove          the user's configuration, made small, computes what one process computes, in fp64
    run_preflight  replicas at full size, fed the same samples, compute the same bits
    run_replay     an iteration of a finished run again: its documents, its numbers, its hardware

    certificate, reference, watch, verdict      one process, the ranks beside it, the first difference between them
    shrink, branches, elsewhere, number_format  the small configuration; what makes each `if` of an update take both
                                                sides; other layouts for its checkpoint; the user's number format
    correction                                  `--staleness-correction` by formulas of its own
    preflight, gradient_taps                    digests of what each replica computes
    replay, replay_config, history              the pass over the iteration, its configuration, the run's past
    numbers, documents, outliers                what was logged beside what is computed now; loss by document

The certificate uses `megalite.testing`, as the tests do: the same oracle, and ranks that the same harness forks. What
needs torch is imported at its first use, so that a wrong configuration is refused at once. Nothing prints: a function
`say` takes each line of an account. `tools/prove_layout.py` and `tools/replay.py` are the commands. Proved by
`test_prove_layout.py`, `test_prove_updates.py`, `test_prove_corrections.py` (mistakes are planted, and must be named
with their place), `test_preflight.py`, `test_replay.py` and `test_replay_digits.py`.
"""

from typing import TYPE_CHECKING, Any

from megalite.proof.shrink import made_data, shrink

if TYPE_CHECKING:
    from megalite.proof.certificate import prove
    from megalite.proof.preflight import run_preflight
    from megalite.proof.replay import run_replay

#: What is imported at its first use, and from where.
LATER = {"prove": "certificate", "run_preflight": "preflight", "run_replay": "replay"}


def __getattr__(name: str) -> Any:
    if name in LATER:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
