"""Kills one run a thousand times, in several ways, and compares its last state with that of a run that nobody
disturbed: `python scripts/thousand_kills.py [--kills N] [--seed S] [--folder DIR]`.

Each turn starts the same command. At a random moment one rank, or the whole launch, gets SIGKILL, or SIGTERM; sometimes
the saves of the host are lost with it (`--non-persistent-ckpt-type local` and `in_memory` in turn). A kill that comes
before the first new save leaves the run where it was, so the kills end only with their number. Then the run is left to
end, and all its tensors must be those of the undisturbed run, bit for bit: one hash.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = (
    "pretrain_gpt.py --nprocs 2 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --fp64 "
    "--device cpu --eval-iters 0 --log-interval 50 --zero-stage 1 --keep-last-n 2 --save-interval 200"
).split()


def command(folder: Path, name: str, iterations: int, saves: list[str]) -> list[str]:
    return [
        sys.executable,
        *RUN,
        "--train-iters",
        str(iterations),
        "--save",
        str(folder / name),
        "--auto-resume",
        *saves,
    ]


def started(argv: list[str]) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        argv, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def ranks_of(process: subprocess.Popen[bytes]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def disturb(process: subprocess.Popen[bytes], rng: random.Random, seconds: float) -> str:
    """Kills the run or a part of it after a while; how, or empty where it had ended by itself."""
    try:
        process.wait(rng.uniform(0.2, seconds))
        return ""
    except subprocess.TimeoutExpired:
        pass
    how = rng.choice(["launch", "rank", "signal"])
    ranks = ranks_of(process)
    if how == "rank" and ranks:
        os.kill(rng.choice(ranks), signal.SIGKILL)
    elif how == "signal":
        process.send_signal(signal.SIGTERM)
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return how


def state_of(folder: Path) -> str:
    """The hash of all tensors of the newest checkpoint."""
    sys.path.insert(0, str(ROOT))
    from megalite.checkpoint import CheckpointReader, flat_bytes, resolve_checkpoint

    reader, digest = CheckpointReader(resolve_checkpoint(folder)), hashlib.sha256()
    for name in sorted(reader.names):
        digest.update(name.encode())
        digest.update(flat_bytes(reader.read(name)))
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0, help="a kill comes within this time of the start")
    parser.add_argument("--iterations", type=int, help="of the run; unset: 40 for each kill")
    parser.add_argument("--folder", type=Path, help="where runs are; unset: a temporary one")
    given = parser.parse_args()
    rng, folder = random.Random(given.seed), given.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    iterations = given.iterations or 40 * given.kills
    memory = Path("/dev/shm") / f"megalite-kills-{os.getpid()}"
    places = {"local": folder / "disk", "in_memory": memory}
    counts: dict[str, int] = {}
    began, kills, lost = time.monotonic(), 0, 0
    while kills < given.kills:
        kind = rng.choice([*places])
        saves = f"--non-persistent-save-interval 20 --non-persistent-ckpt-type {kind}".split()
        process = started(
            command(folder, "run", iterations, [*saves, "--non-persistent-local-ckpt-dir", str(places[kind])])
        )
        how = disturb(process, rng, given.seconds)
        error = process.stderr.read().decode(errors="replace") if process.stderr is not None else ""
        if process.returncode == 2:
            raise SystemExit(f"after {kills} kills a start was refused:\n{error[-2000:]}")
        if not how:
            break  # done before the last kill
        kills += 1
        counts[how] = counts.get(how, 0) + 1
        if rng.random() < 0.1:
            lost += 1
            shutil.rmtree(places[kind], ignore_errors=True)
        if kills % 10 == 0:
            print(
                f"{kills} kills in {time.monotonic() - began:.0f} s: {counts}, saves of the host lost {lost} times",
                flush=True,
            )
    for name in ("run", "quiet"):
        process = started(command(folder, name, iterations, []))
        _, error_bytes = process.communicate()
        if process.returncode:
            raise SystemExit(f"{name}: status {process.returncode}\n{error_bytes.decode(errors='replace')[-2000:]}")
    shutil.rmtree(memory, ignore_errors=True)
    hashes = {name: state_of(folder / name) for name in ("run", "quiet")}
    print(f"{kills} kills ({counts}), saves of the host lost {lost} times, {iterations} iterations")
    print("\n".join(f"{name:5} {digest}" for name, digest in hashes.items()))
    return 0 if len({*hashes.values()}) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
