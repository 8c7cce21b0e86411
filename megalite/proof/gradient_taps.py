"""A look at each gradient when what this rank computed of it is complete, and before anything is reduced."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megalite.parallel.zero import ParameterBuffers


def tap_gradients(family: ParameterBuffers, see: Callable[[Any], None]) -> None:
    """Calls `see(bucket)` before the bucket's reduction starts (of tied parameters: before the sum over their stages).

    A bucket that is reduced after every micro-batch is seen as often.
    """

    def before(bucket: Any, launch: Callable[..., None]) -> Callable[..., None]:
        def launched(**options: bool) -> None:
            if not bucket.plan.tied:
                bucket.zero_unused()
                see(bucket)
            launch(**options)

        return launched

    for bucket in family.buckets:
        gradient: Any
        for gradient in bucket.gradients:
            gradient.launch = before(bucket, gradient.launch)
    reducer: Any = family.gradients
    tied = reducer.tied

    def tied_gradients() -> list[Tensor]:
        found: list[Tensor] = tied()
        for bucket in family.buckets:
            if bucket.plan.tied:
                see(bucket)
        return found

    reducer.tied = tied_gradients
