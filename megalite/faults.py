"""Fault points: the named instants at which the reliability tests kill, stop or confuse a rank (floor 0).

Product code says where it is, `fault_point("save.before_rename", rank=rank, step=step)`, and that is all it ever
does: no flag and no environment variable can make a fault point act. Only the rank harness can, by
`megalite.testing.fault.install` in a process that it has forked; the lookup below is then no longer empty.
"""

import sys


def fault_point(name: str, **where: object) -> None:
    """Marks an instant at which a test may inject a fault. name: dotted, unique in the project. where: facts that a
    test can select by, usually `rank` and `step`."""
    if (testing := sys.modules.get("megalite.testing.fault")) is not None:
        testing.reach(name, where)
