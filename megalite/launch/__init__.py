"""From a command to running ranks, and what is said when one of them dies.

`launcher.py` makes a World, a process group and local ranks of an environment, which it alone reads. Nothing here
imports torch before a rank needs it: the launcher's own process stays small and single-threaded, so that it can fork.
Proof: `tests/distributed/launch/`, `tests/faults/test_launcher.py`, `test_outer_launchers.py`.
"""

from megalite.launch.devices import check_devices
from megalite.launch.launcher import (
    INTERRUPTED,
    LaunchEnvironment,
    advise_threads,
    end_launcher,
    launch,
    read_environment,
)
from megalite.launch.output import log_to_stdout, print_error, print_interrupted
from megalite.launch.signals import EndAtOnce, replace_handlers
from megalite.launch.supervisor import SAME_SECONDS, Outcome, die_with_parent, supervise
