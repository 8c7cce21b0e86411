"""From a command to running ranks, and what is said when one of them dies.

    launcher.py     environment -> World, process group, local ranks: the only reader of environment variables
    environment.py  who started this process, and as which rank (pure)
    supervisor.py   forks the ranks of one host, watches them and names the first that failed (rank_page.py)
    meeting.py      the store where ranks meet, the way to other hosts; devices.py: what they compute on
    watch.py        the same for ranks that torchrun, srun, mpirun or a hand has started
    pulse.py        who is lost, though no connection has broken
    signals.py      what SIGTERM and its like do before training begins; in training: `megalite.train.exits`
    self_test.py    at start: who is missing, whose configuration differs, is a sum right

Nothing here imports torch before a rank needs it: the launcher's own process stays small and single-threaded, so that
it can fork. Proof: `tests/distributed/launch/`, `tests/faults/test_launcher.py`, `test_outer_launchers.py`.
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
from megalite.launch.rank_page import RankPage
from megalite.launch.signals import EndAtOnce, replace_handlers
from megalite.launch.supervisor import SAME_SECONDS, Outcome, die_with_parent, supervise
