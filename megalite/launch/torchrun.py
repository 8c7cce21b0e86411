"""torchrun with an exit status that means something: 2 where a flag, a file or a checkpoint is wrong.

    python -m megalite.launch.torchrun <flags of torchrun> pretrain_gpt.py <flags>

torchrun itself ends with 1 whatever a rank says, so a cluster cannot tell a run to start again from one to give up.
"""

import signal
import sys


def main(argv: list[str]) -> int:
    """Runs torchrun. 0: done; 2: a rank found what will be wrong again; 128 and a signal's number; else that of the
    rank that failed first."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = run.parse_args(argv)
    args.signals_to_handle = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
    try:
        run.run(args)
    except SignalException as error:
        return 2 if error.sigval == signal.SIGUSR2 else 128 + error.sigval  # SIGUSR2: see `end_launcher`
    except ChildFailedError as error:
        statuses = [failure.exitcode for failure in error.failures.values()]
        if 2 in statuses:
            return 2
        sys.stderr.write(f"{error}\n")
        first = error.get_first_failure()[1].exitcode
        return first if first > 0 else 128 - first
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
