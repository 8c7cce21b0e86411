"""The wall clock is set by an hour in the middle of a run: nothing waits, ends, or is told to have lasted so long."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_run_ends import command, records, saved

ROOT = Path(__file__).resolve().parents[2]
# In place of the system's clock, for Python and for torch's libraries: late by what the file says.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long jump(void) {
    char text[32] = {0};
    const char *path = getenv("CLOCK_JUMP");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return 0;
    if (read(file, text, 31) < 0) text[0] = 0;
    close(file);
    return atol(text);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += jump();
    return status;
}
int gettimeofday(struct timeval *now, void *zone) {
    int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int status = real(now, zone);
    now->tv_sec += jump();
    return status;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and LD_PRELOAD")
    (tmp_path / "shim.c").write_text(SHIM)
    library = tmp_path / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "shim.c", "-ldl"], check=True)
    return library


@pytest.mark.full
@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_run_does_not_notice(tmp_path: Path, shim: Path, seconds: int) -> None:
    clock, folder = tmp_path / "clock", tmp_path / "run"
    environment = {**os.environ, "LD_PRELOAD": str(shim), "CLOCK_JUMP": str(clock), "OMP_NUM_THREADS": "1"}
    more = ("--nprocs", "2", "--exit-duration-in-mins", "30", "--distributed-timeout-minutes", "1", "--async-save")
    argv = [sys.executable, "pretrain_gpt.py", *command(folder, *more, "--save-interval", "4", steps=12)]
    running = subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert running.stdout is not None
    said = []
    for line in running.stdout:
        said.append(line)
        if re.search(r"iteration +3/", line):
            clock.write_text(str(seconds))
    assert running.wait(60) == 0, "".join(said)
    assert saved(folder) == ["iter_0000004", "iter_0000008", "iter_0000012"] and (folder / "COMPLETED").exists()
    times = [record["time"] for record in records(folder, "train")]
    assert times[0][:13] != times[-1][:13], "the clock has jumped"
    assert all(0 < record["iteration_time_ms"] < 60e3 for record in records(folder, "train"))
    assert not (folder / "run.lock").exists() and "warning" not in "".join(said).lower()
