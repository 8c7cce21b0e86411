"""JobSet, Dockerfiles and Ray: what can be checked without a cluster, and Ray on this machine where it is installed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.config import parse

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --fp64 --device cpu --eval-iters 0 --log-interval 1 "
    "--global-batch-size 8 --train-iters 60 --save-interval 5 --auto-resume"
).split()


@pytest.fixture(name="job")
def fixture_job() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "examples" / "jobset.yaml").read_text()))


def test_the_pods_of_the_jobset_meet_and_their_flags_parse(job: dict[str, Any]) -> None:
    """The address of pod 0 is made of names that stand elsewhere in the file, the port is opened, and volumes exist."""
    (nodes,) = job["spec"]["replicatedJobs"]
    spec = nodes["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    flags = dict(word[2:].partition("=")[::2] for word in container["command"] if word.startswith("--"))
    name = job["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert flags["rdzv-endpoint"] == f"{name}-{nodes['name']}-0-0.{name}:{port}"
    assert int(flags["nnodes"]) == spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
    assert int(flags["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    start = container["command"].index("pretrain_gpt.py")
    assert start == len(container["command"]) - 1
    config = parse([*container["args"], "--vocab-size", "32000"], world_size=32, check_files=False)
    assert config.checkpoint.auto_resume and config.parallel.restarts.check_hosts
    reads = {"tokenizer.json": "HuggingFaceTokenizer", "tokenizer.model": "SentencePieceTokenizer"}
    source = config.data
    assert source.tokenizer_type == reads[Path(str(source.tokenizer_model)).name]


def test_status_2_of_a_pod_fails_the_jobset(job: dict[str, Any]) -> None:
    """Its launcher keeps the status, the Job fails for it by its own policy, and JobSet starts no such Job again."""
    (nodes,) = job["spec"]["replicatedJobs"]
    spec = nodes["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "megalite.launch.torchrun"]
    (rule,) = spec["podFailurePolicy"]["rules"]
    exits = {"containerName": container["name"], "operator": "In", "values": [2]}
    assert rule == {"action": "FailJob", "onExitCodes": exits}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # or Kubernetes refuses the policy
    (rule,) = job["spec"]["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


RANKS = {
    "from megalite.launch import end_launcher, read_environment; end_launcher(read_environment()); time.sleep(60)": 2,
    "sys.exit(2)": 2,
    "sys.exit(5)": 5,
    "os.kill(os.getppid(), 15); time.sleep(60)": 143,  # as the cluster ends a pod
}


def test_the_launcher_of_a_pod_keeps_the_status(tmp_path: Path) -> None:
    """The first rank says that nothing will mend it, as pretrain_gpt.py does; its launcher would start it again."""
    flags = "--standalone --nproc-per-node=1 --max-restarts".split()
    calls = []
    for number, (body, status) in enumerate(RANKS.items()):
        (tmp_path / f"{number}.py").write_text(f"import os, sys, time\n{body}\n")
        calls.append([*flags, str(int(status in (143, 2) and "sleep" in body)), str(tmp_path / f"{number}.py")])
    program = f"from megalite.launch.torchrun import main\nprint([main(call) for call in {calls}])"
    path = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=path, capture_output=True, text=True)
    assert done.stdout.split("\n")[-2:] == [str([*RANKS.values()]), ""], done.stderr
    assert "Traceback" not in done.stderr


def test_the_pod_is_one_by_kubernetes_own_schema(job: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    (nodes,) = job["spec"]["replicatedJobs"]
    inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": nodes["template"]["spec"]}
    validate.validate(inner, "1.31", strict=True)
    inner["spec"]["template"]["spec"]["containers"][0]["imagePulPolicy"] = "Always"
    with pytest.raises(validate.ValidationError):
        validate.validate(inner, "1.31", strict=True)


@pytest.mark.parametrize("name", ["Dockerfile.cuda", "Dockerfile.rocm"])
def test_an_image_copies_what_there_is_and_all_that_the_package_needs(name: str) -> None:
    text = (ROOT / "docker" / name).read_text()
    copied = [word for line in re.findall(r"^COPY (.*)$", text, re.M) for word in line.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    assert {"megalite", "tools", "pyproject.toml", "pretrain_gpt.py", "configs"} <= {*copied}
    assert text.count("FROM ") == 1 and f"-f docker/{name} " in text


def ranks_of(run: Path) -> list[int]:
    """Processes that run pretrain_gpt.py and save there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if words[1:2] and words[1].endswith(b"pretrain_gpt.py") and str(run).encode() in words:
                found.append(int(path.name))
    return found


@pytest.mark.full
def test_ray_starts_the_ranks_again_when_one_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    run = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/ray_train.py", "2", *TINY, "--save", str(run)]
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while not list(run.glob("iter_*[0-9]")):
            assert time.monotonic() < deadline and driver.poll() is None, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.1)
        os.kill(ranks_of(run)[0], signal.SIGKILL)
        assert driver.wait(timeout=300) == 0, (tmp_path / "log").read_text()[-4000:]
    finally:
        driver.kill()
    assert (run / "COMPLETED").exists()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "start" for line in lines) == 2
