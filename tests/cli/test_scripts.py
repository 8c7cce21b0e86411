"""The launch scripts: valid shell, and DRY_RUN=1 prints a command whose flags the parser accepts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megalite.config import parse

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.s[hb]*"), ROOT / ".ci" / "run"])
MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 16 --micro-batch-size 1 --lr 1 --mock-data "
    "--vocab-size 64"
)


def _dry_run(script: str, *arguments: str, **variables: str) -> list[str]:
    """Words of the command that the script would run."""
    environment = {"PATH": os.environ["PATH"]}
    result = subprocess.run(
        [str(ROOT / "scripts" / script), *arguments],
        env=environment | {"DRY_RUN": "1"} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return shlex.split(result.stdout)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_syntax(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_fail_on_the_first_error(script: Path) -> None:
    sourced = script.name == "environment.sh"
    assert os.access(script, os.X_OK) != sourced
    assert ("set -euo pipefail" in script.read_text()) != sourced


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "launcher", "world_size"),
    [
        ("pretrain_gpt_1node.sh", ["data", "out"], {}, "torchrun --standalone --nproc-per-node 8", 8),
        (
            "pretrain_gpt_1node.sh",
            ["data", "out"],
            {"GPUS_PER_NODE": "2"},
            "torchrun --standalone --nproc-per-node 2",
            2,
        ),
        (
            "pretrain_gpt_multinode.sh",
            ["data", "tokenizer.json", "out"],
            {"MASTER_ADDR": "n0", "NODE_RANK": "3"},
            "torchrun --nproc-per-node 8 --nnodes 4 --node-rank 3 --master-addr n0 --master-port 6000",
            32,
        ),
        (
            "slurm.sbatch",
            ["out", *MODEL.split(), "--train-iters", "1"],
            {},
            "srun --kill-on-bad-exit=1 --cpus-per-task=8 python",
            8,
        ),
        (
            "mpirun.sh",
            [*MODEL.split(), "--train-iters", "1"],
            {"NP": "4", "HOSTS": "a:2,b:2", "MASTER_ADDR": "a"},
            "mpirun -np 4 --bind-to none --host a:2,b:2 -x MASTER_ADDR python",
            4,
        ),
    ],
)
def test_dry_run_prints_a_command_that_parses(
    script: str, arguments: list[str], variables: dict[str, str], launcher: str, world_size: int
) -> None:
    command = _dry_run(script, *arguments, "--seed", "77", **variables)
    start = next(place for place, word in enumerate(command) if word.endswith("pretrain_gpt.py"))
    assert " ".join(command[:start]).startswith(launcher)
    flags = command[start + 1 :]
    if "GPT2BPETokenizer" in flags or "HuggingFaceTokenizer" in flags:
        flags += ["--vocab-size", "50257"]
    config = parse(flags, world_size=world_size, check_files=False)
    assert config.training.seed == 77
    if script != "mpirun.sh":  # a job that comes back passes over a damaged checkpoint, and may begin with --load MODEL
        assert (config.checkpoint.save, config.checkpoint.load, config.checkpoint.auto_resume) == ("out", None, True)


@pytest.mark.parametrize("script", ["pretrain_gpt_1node.sh", "pretrain_gpt_multinode.sh", "slurm.sbatch"])
@pytest.mark.parametrize("words", [[], ["--help"], ["--config", "my.yaml"]], ids=" ".join)
def test_missing_arguments_show_the_usage(script: str, words: list[str]) -> None:
    result = subprocess.run([str(ROOT / "scripts" / script), *words], capture_output=True, text=True)
    assert result.returncode == 2 and not result.stdout
    assert re.match(r"usage: .*SAVE_DIR", result.stderr) and "line " not in result.stderr
    assert script != "pretrain_gpt_multinode.sh" or {"NNODES", "NODE_RANK", "MASTER_ADDR"} <= {*result.stderr.split()}


@pytest.mark.parametrize("config", [["--config", "configs/llama_1b.yaml"], ["--config=configs/llama_1b.yaml"]])
def test_a_configuration_of_ones_own_is_given_no_flags_of_another_model(config: list[str]) -> None:
    """With `--config` the script of many nodes adds data, tokenizer and SAVE_DIR, or SAVE_DIR alone."""
    data = ["--data-path", "data", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "t.json"]
    for names, added in ((["out"], []), (["data", "t.json", "out"], data)):
        words = _dry_run("pretrain_gpt_multinode.sh", *names, *config, "--seed", "77")
        flags = words[words.index(str(ROOT / "pretrain_gpt.py")) + 1 :]
        assert flags == [*added, "--save", "out", "--auto-resume", *config, "--seed", "77"]
    found = subprocess.run(
        [str(ROOT / "scripts" / "pretrain_gpt_1node.sh"), "data", "out", *config], capture_output=True, text=True
    )
    assert found.returncode == 2 and f"torchrun --standalone --nproc-per-node 8 {ROOT}/pretrain_gpt.py" in found.stderr


@pytest.mark.parametrize(
    ("variables", "wants"),
    [({}, "NODE_RANK="), ({"MASTER_ADDR": "n0"}, "NODE_RANK="), ({"NNODES": "2:4"}, "MASTER_ADDR=")],
)
def test_a_node_that_does_not_know_its_place_is_refused(variables: dict[str, str], wants: str, tmp_path: Path) -> None:
    """Or it would wait at itself for the others."""
    (tmp_path / "torchrun").write_text("#!/bin/bash\necho $@\n")
    (tmp_path / "torchrun").chmod(0o755)
    command = [str(ROOT / "scripts" / "pretrain_gpt_multinode.sh"), "out", "--config", "my.yaml"]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=path | variables, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: NNODES=") and wants in done.stderr
    for whole in ({"NNODES": "1"}, {"MASTER_ADDR": "n0"} | variables | {"NODE_RANK": "1"}):
        done = subprocess.run(command, env=path | whole, capture_output=True, text=True)
        assert done.returncode == 0 and "pretrain_gpt.py" in done.stdout


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2: with NNODES=2 nodes are numbered 0 to 1,"),
        ({"NNODES": "2", "NODE_RANK": "-1"}, "NODE_RANK=-1: with"),
        ({"NNODES": "16", "NODE_RANK": "node3"}, "NODE_RANK=node3: with NNODES=16 nodes are numbered 0 to 15,"),
        ({"NNODES": "1", "NODE_RANK": "1", "DRY_RUN": "1"}, "NODE_RANK=1: with NNODES=1 nodes"),
        ({"NNODES": "two", "NODE_RANK": "0"}, "NNODES=two: give a number"),
        ({"NNODES": "10", "NODE_RANK": "08"}, ""),
    ],
)
def test_a_node_with_a_number_that_none_has_is_refused(variables: dict[str, str], said: str, tmp_path: Path) -> None:
    """Or all nodes would wait in silence, also for one that is numbered from 1."""
    (tmp_path / "torchrun").symlink_to("/bin/true")
    command = [str(ROOT / "scripts" / "pretrain_gpt_multinode.sh"), "out", "--config", "my.yaml"]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "n0"}
    done = subprocess.run(command, env=path | variables, capture_output=True, text=True)
    assert done.returncode == (2 if said else 0) and done.stderr.count("\n") == bool(said)
    assert done.stderr.startswith(f"error: {said}" if said else "")


@pytest.mark.parametrize(
    ("script", "names"),
    [("pretrain_gpt_1node.sh", "data out"), ("pretrain_gpt_multinode.sh", "out --config a.yaml"), ("mpirun.sh", "")],
)
def test_paths_are_those_of_the_folder_where_a_script_is_called(script: str, names: str, tmp_path: Path) -> None:
    """What DRY_RUN=1 prints works there, too."""
    for launcher in ("torchrun", "mpirun"):
        (tmp_path / launcher).write_text("#!/bin/bash\npwd\nprintf '%s\\n' $0 $@\n")
        (tmp_path / launcher).chmod(0o755)
    place = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NNODES": "1"}
    command = [str(ROOT / "scripts" / script), *names.split()]
    done, printed = (
        subprocess.run(command, cwd=tmp_path, env=place | more, capture_output=True, text=True, check=True).stdout
        for more in ({}, {"DRY_RUN": "1"})
    )
    where, _, *words = done.split()
    assert where == str(tmp_path) and str(ROOT / "pretrain_gpt.py") in words
    assert shlex.split(printed)[1:] == words


def _slurm_job(folder: Path, srun: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs slurm.sbatch with programs that do what SLURM's would; `told` is what they were told."""
    programs = {
        "srun": f"echo srun $@ >> {folder}/told\n{srun}",
        "scontrol": f"echo $@ >> {folder}/told",
        "scancel": "true",
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7"}
    command = [str(ROOT / "scripts" / "slurm.sbatch"), "out"]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("status", "requeued"), [(0, True), (138, True), (1, False)])
def test_a_job_whose_time_is_up_is_requeued(status: int, requeued: bool, tmp_path: Path) -> None:
    """Five minutes before the limit SLURM signals the script; 138 are ranks that the signal met before training."""
    done = _slurm_job(tmp_path, f"kill -USR1 $PPID\nsleep 0.5\nexit {status}")
    assert done.returncode == status, done.stderr
    assert ("requeue 7" in (tmp_path / "told").read_text()) == requeued


@pytest.mark.parametrize(
    ("statuses", "saves", "last", "starts"),
    [
        ("1 0", "", 0, 2),
        ("1 139 1 1 0", "0 1 2 3 4", 1, 4),  # MAX_RESTARTS is 3
        ("1 1 1 0", "", 1, 3),  # three attempts without a new checkpoint
        ("1 2 0", "", 2, 2),
        ("143 0", "", 143, 1),
    ],
)
def test_a_job_whose_ranks_crash_starts_them_again(
    statuses: str, saves: str, last: int, starts: int, tmp_path: Path
) -> None:
    """saves: attempts that make a checkpoint before they end."""
    (tmp_path / "out").mkdir()
    done = _slurm_job(
        tmp_path,
        f"all=({statuses}) saves=' {saves} ' n=$(($(grep -c ^srun {tmp_path}/told) - 1))\n"
        f'[[ $saves != *" $n "* ]] || echo $n > {tmp_path}/out/latest_checkpointed_iteration.txt\n'
        "exit ${all[$n]}",
    )
    assert done.returncode == last, done.stderr
    assert (tmp_path / "told").read_text().count("srun") == starts
    assert ("three attempts have made no new checkpoint" in done.stderr) == (statuses == "1 1 1 0")


def test_a_job_goes_on_without_hosts_that_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "left_out.txt").write_text("2026-01-01 host gpu01 is left out: another job's\n")
    bad = "2026-11-25 20:00:00 UTC host gpu07 is left out: cuda:3: 7 numbers are wrong"
    srun = f"[[ $1$* == *exclude* ]] || {{ echo '{bad}' >> {tmp_path}/out/left_out.txt; exit 2; }}"
    done = _slurm_job(tmp_path, srun, SLURM_JOB_NUM_NODES="4", SLURM_NTASKS="32")
    assert done.returncode == 0, done.stderr
    assert "--nodes=3 --ntasks=24 --exclude=gpu07 python pretrain_gpt.py" in (tmp_path / "told").read_text()


def test_a_container_sees_the_checkout_and_the_run(tmp_path: Path) -> None:
    command = _dry_run("slurm.sbatch", "/runs/a", CONTAINER_IMAGE="m.sqsh", CONTAINER_MOUNTS="/data:/data")
    assert f"--container-mounts={ROOT}:{ROOT},/runs/a:/runs/a,/data:/data" in command
    assert {"--container-image=m.sqsh", f"--container-workdir={ROOT}"} <= {*command}


def test_nodes_from_to_meet_by_a_rendezvous_that_lets_them_come_and_go() -> None:
    words = _dry_run("pretrain_gpt_multinode.sh", "data", "tokenizer.json", "runs/a", NNODES="2:4", MASTER_ADDR="n0")
    launcher = " ".join(words[: words.index(str(ROOT / "pretrain_gpt.py"))])
    assert launcher == (
        "torchrun --nproc-per-node 8 --nnodes 2:4 --max-restarts 10 --rdzv-backend c10d --rdzv-endpoint n0:6000 "
        "--rdzv-id a"
    )
