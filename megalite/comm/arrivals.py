"""Which messages of a batch have arrived: one posted receive a direction, and a thread that waits for it.

gloo cannot be asked whether a receive is complete, only waited for; so a thread waits and says so. The next receive of
its direction is posted as soon as one is complete, so that no sender waits for this rank's computations.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue

from torch import Tensor

from megalite.comm.axis import WaitClock
from megalite.comm.p2p import Incoming, IncomingMessage

Post = Callable[[], Incoming]


class Arrivals:
    """Tensors in the order in which each direction sends them.

    posts: direction -> calls that post its receives, one for each message of the batch. waits: counts the time for
    which the caller of `wait` finds nothing.
    """

    def __init__(self, posts: Mapping[str, Sequence[Post]], waits: WaitClock) -> None:
        self._here: dict[str, deque[Tensor]] = {name: deque() for name in posts}
        self._said: SimpleQueue[tuple[str, Tensor | Exception]] = SimpleQueue()
        self._waits = waits
        for name, calls in posts.items():
            # A daemon: where the run ends early, nobody waits for a message that never comes.
            threading.Thread(target=self._receive, args=(name, calls), daemon=True, name=f"arrivals-{name}").start()

    def _receive(self, name: str, posts: Sequence[Post]) -> None:
        try:
            for post in posts:
                incoming = post()
                if isinstance(incoming, IncomingMessage):
                    incoming = replace(incoming, waits=WaitClock())  # a thread's waiting is nobody's
                self._said.put((name, incoming.wait()))
        except Exception as error:
            self._said.put((name, error))

    def here(self, name: str) -> bool:
        """Whether a message of the direction has arrived and has not been taken."""
        while not self._said.empty():
            self._keep(*self._said.get())
        return bool(self._here[name])

    def wait(self) -> None:
        """Returns when another message has arrived. Raises what its receive raised (PeerLost)."""
        with self._waits:
            said = self._said.get()
        self._keep(*said)

    def take(self, name: str) -> Tensor:
        return self._here[name].popleft()

    def _keep(self, name: str, x: Tensor | Exception) -> None:
        if isinstance(x, Exception):
            raise x
        self._here[name].append(x)
