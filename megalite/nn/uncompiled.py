"""Functions that torch.compile leaves out. `torch.compiler.disable` imports the compiler, a second of each start, where
it decorates a function: here it does so once something is compiled."""

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@cache
def _waiting() -> list[Any]:
    """Those that the compiler has not been told of."""
    return []


class Uncompiled(Generic[P, T]):
    """A function; `Uncompiled.settle` comes before the first compilation of what calls it."""

    def __init__(self, call: Callable[P, T]) -> None:
        self.call, self.__doc__, self.__name__ = call, call.__doc__, call.__name__
        _waiting().append(self)

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> T:
        return self.call(*arguments, **named)

    @staticmethod
    def settle() -> None:
        """Keeps the compiler out of all of them."""
        while _waiting():
            each = _waiting().pop()
            each.call = torch.compiler.disable(each.call)
