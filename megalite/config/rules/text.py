"""Small words of advice that several rules share."""

from collections.abc import Iterable

TP = "`tensor_model_parallel_size`"
CP = "`context_parallel_size`"
EP = "`expert_model_parallel_size`"
ETP = "`expert_tensor_parallel_size`"
PP = "`pipeline_model_parallel_size`"
VPP = "`virtual_pipeline_model_parallel_size`"


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def multiples_around(number: int, step: int) -> str:
    """The multiples of `step` next to `number`, as advice: `96 or 104`."""
    below, above = number // step * step, (number // step + 1) * step
    return f"{below} or {above}" if below else str(above)


def listed(numbers: Iterable[int], last: int = 12) -> str:
    """Numbers as advice, the first few: `1,2,4,8`."""
    found = list(numbers)
    return ",".join(str(n) for n in found[:last]) + (",..." if len(found) > last else "")
