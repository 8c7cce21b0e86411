"""`--check-hosts`: one wrong number of a product is found, and a host that cannot be asked is no good host."""

from __future__ import annotations

import socket
import subprocess
import sys
from unittest import mock

import pytest
import torch

from megalite.launch import devices, host_check


def test_a_device_that_computes_right_passes_and_one_wrong_number_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert host_check.main(["2", "cpu"]) == 0
    assert capsys.readouterr().out == f"host {socket.gethostname()}: cpu computes right\n"
    multiply, calls = torch.Tensor.__matmul__, []

    def now_and_then(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = multiply(a, b)
        calls.append(a.dtype)
        if len(calls) == 6:  # the second of three bf16 products
            product[3, 4] += 32
        return product

    with mock.patch.object(torch.Tensor, "__matmul__", now_and_then):
        assert host_check.main(["2", "cpu"]) == 1
    assert capsys.readouterr().out == "cpu: 1 of 1,048,576 numbers of a torch.bfloat16 product are wrong\n"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (subprocess.CompletedProcess([], 0, "", ""), ""),
        (subprocess.CompletedProcess([], 1, "cuda:3: 1 of 9 are wrong\n", "a warning\n"), "cuda:3: 1 of 9 are wrong"),
        (subprocess.CompletedProcess([], -11, "", ""), "its check ended with status -11"),
        (subprocess.TimeoutExpired("python", 1), "its devices did not answer for 120 s"),
    ],
)
def test_what_a_host_is_left_out_for(answer: object, problem: str) -> None:
    with mock.patch.object(subprocess, "run", side_effect=[answer]):
        assert devices.host_problem(8, "auto") == problem


def test_asked_by_hand_it_answers_in_one_line() -> None:
    for argv, status, text in (["2", "cpu"], 0, "cpu computes right"), (["cpu"], 2, "usage: python -m megalite"):
        command = [sys.executable, "-m", "megalite.launch.host_check", *argv]
        done = subprocess.run(command, capture_output=True, text=True)
        (line,) = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        assert done.returncode == status and text in line
