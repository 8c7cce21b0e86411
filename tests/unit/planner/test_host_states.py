"""Optimizer states off the device: published efficiencies and sizes, and what their step is priced at."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import Config, parse
from megalite.errors import ConfigError
from megalite.inventory import count_parameters
from megalite.planner import Hardware, Roofline, chunk_capacity, load_hardware, predict
from megalite.planner.host_states import efficiency, host_seconds, host_traffic
from megalite.planner.result_table import states_text
from tools.plan import main


def gpt(layers: int, hidden: int, micro_batch: int, *more: str) -> Config:
    flags = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {hidden // 128} --seq-length 1024 "
    flags += f"--micro-batch-size {micro_batch} --global-batch-size {8 * micro_batch} --lr 1e-4 --train-iters 10 "
    flags += "--mock-data --vocab-size 50257 --fp16 --zero-stage 3"
    return parse([*flags.split(), *more], world_size=8, check_files=False)


def test_efficiencies_of_the_paper() -> None:
    """arXiv 2104.07857's setting, 70 TFLOP/s, sequences of 1,024: ait is seq x batch of parameters and gradients, a
    quarter of it of optimizer states. 70 GB/s give half of the peak at batch 1; 90 % at batch 2 need 1.2 TB/s and
    more ("nearly 1.5 TB/s")."""
    assert efficiency(1024 * 1, 70e9, 70e12) == pytest.approx(0.506, abs=0.001)
    assert efficiency(1024 * 2 / 4, 1.23e12, 70e12) == pytest.approx(0.9, abs=0.001)
    assert efficiency(1024 * 2 / 4, 1.5e12, 70e12) == pytest.approx(0.916, abs=0.001)


@pytest.mark.parametrize(
    ("name", "device_bytes", "host_bytes", "layers", "hidden", "micro_batch", "trained"),
    [("v100", 32 * 2**30, 240e9, 88, 4096, 16, 18e9), ("a100-80gb", 40 * 2**30, 1e12, 66, 9216, 8, 68e9)],
)
def test_what_patrickstar_trained_is_what_devices_and_hosts_hold(
    name: str, device_bytes: float, host_bytes: float, layers: int, hidden: int, micro_batch: int, trained: float
) -> None:
    """arXiv 2108.05818, 8 devices. Micro-batches are those of its own scripts; its attention was not fused: scores of a
    block take 5 a s^2 b bytes (arXiv 2205.05198) that this planner, whose attention is, does not count."""
    config = gpt(layers, hidden, micro_batch)
    assert count_parameters(config.model) == pytest.approx(trained, rel=0.01)
    scores = 5 * config.model.num_attention_heads * 1024**2 * micro_batch
    hardware = replace(load_hardware(name), memory_bytes=device_bytes - scores, host_memory_bytes=host_bytes)
    assert chunk_capacity(config, 8, hardware) == pytest.approx(trained, rel=0.15)


def with_host(**rates: float) -> Hardware:
    unknown = {"host_link": 0.0, "host_copy": 0.0}
    return replace(load_hardware("a100-80gb"), **unknown | rates)


def optimizer_seconds(hardware: Hardware, *flags: str) -> float:
    return predict(gpt(8, 2048, 1, *flags), 8, hardware, Roofline(hardware)).breakdown["optimizer"]


def test_a_step_on_the_host_is_priced_by_its_slowest_tier(tmp_path: Path) -> None:
    """8 devices share a host: 24 bytes of states, read and written, 4 of the gradient and 2 of the weight each."""
    host, file = ("--optimizer-cpu-offload",), ("--optimizer-offload-path", str(tmp_path))
    known = with_host(host_link=25e9, host_copy=100e9, disk_read=6e9, disk_write=3e9)
    owned = predict(gpt(8, 2048, 1, *host), 8, known, Roofline(known)).offloaded_elements
    on_device = optimizer_seconds(known)
    expected = owned * 6 / 25e9 + owned * 30 / (100e9 / 8)
    there = optimizer_seconds(known, *host)
    assert there == pytest.approx(expected, rel=0.05) and there > on_device
    disk = owned * 6 / 25e9 + owned * (12 / 6e9 + 12 / 3e9) * 8
    assert optimizer_seconds(known, *file) == pytest.approx(disk, rel=0.05)
    half = optimizer_seconds(known, *host, "--optimizer-offload-fraction", "0.5")
    assert half == pytest.approx((there + on_device) / 2, rel=0.05)
    assert optimizer_seconds(with_host(), *host) == on_device, "of what no number is known none is invented"


def test_a_delayed_update_is_hidden_as_far_as_the_batch_is_long() -> None:
    flags = ("--optimizer-cpu-offload", "--delayed-parameter-update")
    fast, slow = (with_host(host_link=100 * rate, host_copy=rate) for rate in (1e12, 4e9))
    assert optimizer_seconds(fast, *flags[:1]) > 1e-2 and optimizer_seconds(fast, *flags) == pytest.approx(
        0.0, abs=1e-3
    )
    pipeline = predict(gpt(8, 2048, 1, *flags), 8, slow, Roofline(slow)).breakdown["pipeline"]
    assert optimizer_seconds(slow, *flags[:1]) - optimizer_seconds(slow, *flags) == pytest.approx(pipeline, rel=1e-6)


def test_the_plan_says_what_is_left_of_the_peak(tmp_path: Path) -> None:
    known = with_host(host_link=25e9, host_copy=100e9, disk_read=6e9, disk_write=3e9)
    found = predict(gpt(8, 2048, 1, "--optimizer-offload-path", str(tmp_path)), 8, known, Roofline(known))
    link, host, disk = states_text(found, known)
    ait = found.model_flops / 8 / (found.offloaded_elements * 24)
    share = efficiency(ait, 4e9 / 8, 312e12)
    assert disk == (
        f"optimizer states over the disk: {ait:,.0f} FLOP a byte, 0.5 GB/s a device: {share:.1%} of the peak if "
        "nothing hides it (arXiv 2104.07857)"
    )
    assert "the link to the host" in link and "the host's memory" in host
    assert "tools/doctor.py measures them" in states_text(found, with_host())[0]
    assert states_text(found, with_host(host_link=25e9, host_copy=100e9))[2].startswith(
        "optimizer states over the disk: its rate is"
    )
    assert host_seconds(host_traffic(found.config, 1.0, with_host(), found.plan)) == 0.0


def test_the_largest_model_of_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 1024 --micro-batch-size 4 "
    flags += "--global-batch-size 32 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 50257 --fp16 --zero-stage 3 "
    flags += "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --recompute-granularity full "
    flags += "--num-devices 8 --hardware v100 --what-if largest-model"
    assert main([*flags.split(), "--host-memory-gb", "240"]) == 0
    text = capsys.readouterr().out
    assert "largest model on 8 devices with 240 GB on each host (V100)" in text
    assert "GB too much on each host, all of it states" in text
    (chunks,) = (line for line in text.splitlines() if "in chunks over devices and hosts" in line)
    assert 18 < float(chunks.split()[-3]) < 30
    assert main([*flags.split(), "--host-memory-gb", "0"]) == 2
    assert main([*flags.replace("--what-if largest-model", "").split(), "--host-memory-gb", "240"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"error: --host-memory-gb={given}: the room on each host, above 0, for --what-if largest-model"
        for given in (0, 240)
    ]


@pytest.mark.landing
def test_weights_on_the_host_make_room_for_a_larger_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU of 24 GB, 64 GB of RAM: the host full of weights, gradients and states, the device of the other states;
    with states in a file the host's 4 bytes a parameter bind."""
    flags = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 "
    flags += "--global-batch-size 16 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 50257 --bf16 --zero-stage 2 "
    flags += "--grad-reduce-in-bf16 --hardware rtx-4090 --num-devices 1 --what-if largest-model --host-memory-gb 64"
    largest = []
    for more in ("--optimizer-cpu-offload", "--param-offload cpu", f"--param-offload cpu {tmp_path}"):
        more = more.replace(str(tmp_path), f"--optimizer-offload-path {tmp_path}")
        assert main([*flags.split(), *more.split()]) == 0
        text = capsys.readouterr().out
        largest.append(max(float(n) for n in re.findall(r"^ +([\d.]+) G parameters +[\d,]+ ", text, re.M)))
    plain, both, file = largest
    assert plain < both < 5.2 and both == pytest.approx((64e9 + 20e9) / 16e9, rel=0.06)
    assert file == pytest.approx(64 / 4, rel=0.06)


def test_a_broken_rate_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text((Path("megalite/planner/hardware/h100.yaml")).read_text() + "host_link: fast\n")
    with pytest.raises(ConfigError) as caught:
        load_hardware(str(path))
    assert caught.value.problems == [f"--hardware={path}: host_link: expected a number, got 'fast'"]
