"""Does this host compute right? `--check-hosts` asks before ranks meet: `python -m megalite.launch.host_check 8 auto`.

Matrices of small whole numbers have a product that is known to the last bit in every number format whose sums are in
fp32; a device that gets it wrong once is broken. Takes seconds; `tools/prove_layout.py --preflight` compares whole
steps.
"""

import socket
import sys
import tempfile

SIZE = 1024


def main(argv: list[str]) -> int:
    """Prints the first problem, or what computes right; the exit status."""
    import torch

    if len(argv) != 2 or not argv[0].isdecimal() or argv[1] not in ("auto", "cpu", "cuda"):
        sys.stderr.write("error: usage: python -m megalite.launch.host_check RANKS auto|cpu|cuda\n")
        return 2
    ranks, kind = int(argv[0]), argv[1]
    count = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "cuda" and count == 0:
        sys.stdout.write("torch sees no GPU\n")
        return 1
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        sys.stdout.write(f"its folder of temporary files cannot be written ({error.strerror})\n")
        return 1
    names = [f"cuda:{number}" for number in range(min(count, ranks))] or ["cpu"]
    problem = next((f"{name}: {wrong}" for name in names if (wrong := device_problem(name))), "")
    right = f"{names[0]} computes right" if len(names) == 1 else f"{names[0]} to {names[-1]} compute right"
    sys.stdout.write(f"{problem or f'host {socket.gethostname()}: {right}'}\n")
    return int(bool(problem))


def device_problem(name: str) -> str:
    """Products of whole numbers on a device, several times, compared with those of int64 on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-8, 9, (SIZE, SIZE), generator=generator) for _ in range(2))
    exact = a.double() @ b.double()  # whole numbers below 2**17: exact in every order
    device = torch.device(name)
    for dtype in (torch.float32, torch.bfloat16):
        x, y = a.to(device, dtype), b.to(device, dtype)
        for _ in range(3):
            wrong = int(((x @ y).cpu() != exact.to(dtype)).sum())
            if wrong:
                return f"{wrong:,} of {SIZE * SIZE:,} numbers of a {dtype} product are wrong"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
