"""Stand-in for `torch.cuda.CUDAGraph`: refuses what a graph cannot hold, and spoils what another graph may use.

While it captures    no host reads, no waiting, no random numbers of torch's generators, no arrays of the host
When it replays      memory that it was given from outside must be where it was; numbers of the host that it has kept
                     must be the same
Its memory           comes from a pool. What one graph has freed, later ones of the pool may be given: replayed, a graph
                     leaves NaN in all that was free when it was captured, in what it has freed itself, and in all that
                     graphs captured after it have (as far as it freed anything that these could have been given)

What was computed while capturing is NaN, since a device computes nothing then. The ledger sees a replay as one launch,
which reads and writes what its kernels do, and takes as long as they do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megalite.rehearsal.order import tensors_in
from megalite.rehearsal.streams import DEVICE, Gpu
from megalite.rehearsal.watch import ALLOCATE, Computed


class Cell:
    """A storage that a graph uses. own: of its pool, where its bytes stay as they are once the program has let it go.
    address: where it is at the capture."""

    def __init__(self, storage: torch.UntypedStorage, address: int, *, own: bool) -> None:
        self.own, self.nbytes = own, storage.nbytes()
        self.there: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        self._address, self._shadow = address, torch.UntypedStorage(0)

    @property
    def free(self) -> bool:
        """Whether the program has let it go."""
        return self.there() is None

    def storage(self, address_of: Callable[[torch.UntypedStorage], int]) -> torch.UntypedStorage:
        """Where its bytes are now."""
        storage = self.there()
        if storage is not None and (storage.nbytes(), address_of(storage)) == (self.nbytes, self._address):
            return storage
        if not self.own:
            raise RuntimeError("a graph reads memory from outside that is no longer where it was at its capture")
        if self._shadow.nbytes() != self.nbytes:
            self._shadow = torch.UntypedStorage(self.nbytes)
        return self._shadow

    def keep(self, address_of: Callable[[torch.UntypedStorage], int]) -> None:
        """Its bytes have been written."""
        storage = self.storage(address_of) if self.own else self._shadow
        if storage is not self._shadow:
            self._shadow = torch.UntypedStorage(self.nbytes).copy_(storage)


@dataclass(frozen=True)
class View:
    """A tensor in a cell: dtype, offset, shape, strides."""

    cell: Cell
    form: tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]

    @classmethod
    def whole(cls, cell: Cell) -> View:
        return cls(cell, (torch.uint8, 0, (cell.nbytes,), (1,)))


@dataclass
class Pool:
    """Memory of several graphs, in the order of their capture. alive, most: bytes that the program has, now and at
    most; idle: the rest, which nobody else gets, in pieces that were given back."""

    graphs: list[Graph] = field(default_factory=list)
    alive = most = 0
    idle: list[Tensor] = field(default_factory=list)

    def enter(self, storage: torch.UntypedStorage) -> None:
        self.alive += (nbytes := storage.nbytes())
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self._gone, nbytes).atexit = False

    def rest(self) -> None:
        """A capture has ended."""
        left = self.most - self.alive
        sizes = sorted((cell.nbytes for graph in self.graphs for cell in graph.own if cell.free), reverse=True)
        for size in sizes:
            if 0 < size <= left:
                self.idle.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
                left -= size
        self.idle.append(torch.empty(left, dtype=torch.uint8, device=DEVICE))

    def _gone(self, nbytes: int) -> None:
        self.alive -= nbytes


class Graph(TorchDispatchMode):
    """In place of `torch.cuda.CUDAGraph`; a mode, which gets what is computed while it is captured."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._gpu = gpu
        self.own: list[Cell] = []
        self._cells: dict[int, Cell] = {}
        self._work: list[tuple[Any, str, Any, Any, list[View]]] = []
        self._reads: dict[View, None] = {}
        self._writes: dict[View, None] = {}
        self._numbers: list[tuple[Tensor, Tensor]] = []
        self.seconds = 0.0  # of its kernels, where work has a price

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        self._pool = Pool() if pool is None else pool
        assert self._gpu.current is not self._gpu.compute, "a graph is captured on a stream of its own"
        assert self._gpu.capturing is None, "two captures at once"
        self._earlier = [cell for graph in self._pool.graphs for cell in graph.own]
        self._free_before = [cell for cell in self._earlier if cell.free]
        self._pool.idle.clear()
        self._gpu.local.capturing = self
        self.__enter__()  # type: ignore[no-untyped-call]  # torch's has no types

    def capture_end(self) -> None:
        assert self._gpu.capturing is self, "nothing is being captured"
        self.__exit__(None, None, None)
        self._gpu.local.capturing = None
        self._reused = [cell for cell in (*self._earlier, *self.own) if cell.free]
        self._pool.graphs.append(self)
        self._pool.rest()
        self._spoil(self.own)

    def replay(self) -> None:
        gpu = self._gpu
        with gpu.state(quiet=True, true_device=True):
            if not all(torch.equal(here, then) for here, then in self._numbers):
                raise RuntimeError("a number of the host has changed, and the graph has the one of its capture")
            reads = [self._tensor(view) for view in self._reads]
            written = [*self._writes, *(View.whole(cell) for cell in self.own if not cell.free)]
            writes = [self._tensor(view) for view in written]
        gpu.ledger.work(gpu.current.line, "a graph", reads, writes, (self.seconds, "graphs" * bool(self.seconds)))
        if gpu.place.type == "meta":
            return
        self._spoil(self._free_before)
        with gpu.state(quiet=True, true_device=True):
            for function, name, args, kwargs, outs in self._work:
                self._again(function, name, args, kwargs, outs)
            for cell in self._cells.values():
                cell.keep(self._address)
        later = [cell for graph in self._pool.graphs[self._pool.graphs.index(self) + 1 :] for cell in graph.own]
        self._spoil([*self._reused, *(later if any(cell.free for cell in self.own) else [])])

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One kernel of a capture."""
        kwargs = kwargs or {}
        name, given = function._schema.name.removeprefix("aten::"), tensors_in((args, kwargs))
        state = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in function.tags else None
        out = function(*args, **kwargs)
        if state is not None and bytes(state.numpy()) != bytes(torch.get_rng_state().numpy()):
            raise RuntimeError(f"{name}: a graph draws random numbers, and has no generator")
        made = tensors_in(out)
        if not any(self._gpu.on_device(x) for x in (*given, *made)):
            return out  # work of the host, which is done once
        for x in given:  # numbers of the host are arguments of kernels, which a graph keeps as they are
            if not self._gpu.on_device(x):
                if x.dim():
                    raise RuntimeError(f"{name}: memory of the host is read by a graph, once for all replays")
                self._numbers.append((x, x.detach().clone()))
        kept, named = tree_map_only(Tensor, self._view, (tuple(args), kwargs))
        for view in tree_leaves((kept, named)):
            if isinstance(view, View) and not view.cell.own:
                self._reads[view] = None
                if function._schema.is_mutable:
                    self._writes[view] = None
        place = {"device": self._gpu.place, "pin_memory": None}
        real = named | {key: value for key, value in place.items() if key in kwargs}
        self._work.append((function, name, kept, real, [self._view(x, made=True) for x in made]))
        if (prices := self._gpu.ledger.prices) is not None and not (function.is_view or name in ALLOCATE):
            seconds, kind = prices.kernel(function, args, out)
            nbytes = sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in (*given, *made))
            self.seconds += seconds if kind else prices.moved(nbytes, over_link=False)
        return out

    def _view(self, x: Tensor, *, made: bool = False) -> View:
        storage = x.untyped_storage()
        cell = self._cells.get(storage._cdata)
        if cell is None or cell.there() is not storage:
            others = (graph._cells.get(storage._cdata) for graph in self._pool.graphs)
            known = [cell for cell in others if cell is not None and cell.there() is storage]
            cell = known[0] if known else Cell(storage, self._address(storage), own=made)
            self._cells[storage._cdata] = cell
            if made and not known:
                self.own.append(cell)
                self._pool.enter(storage)
        return View(cell, (x.dtype, int(x.storage_offset()), tuple(x.shape), x.stride()))

    def _address(self, storage: torch.UntypedStorage) -> int:
        return 0 if self._gpu.place.type == "meta" else storage.data_ptr()

    def _tensor(self, view: View) -> Tensor:
        dtype, offset, shape, strides = view.form
        empty = torch.empty(0, dtype=dtype, device=self._gpu.place)
        return empty.set_(view.cell.storage(self._address), offset, shape, strides)

    def _spoil(self, cells: Sequence[Cell]) -> None:
        """Other graphs may have used it: all bits are set, which is NaN in every float format."""
        if self._gpu.place.type != "meta":
            with self._gpu.state(quiet=True, true_device=True):
                for cell in cells:
                    self._tensor(View.whole(cell)).fill_(0xFF)
                    cell.keep(self._address)

    def _again(self, function: Any, name: str, args: Any, kwargs: Any, outs: list[View]) -> None:
        made = Computed()(function, name, *tree_map_only(View, self._tensor, (args, kwargs)), there=True)
        for view, value in zip(outs, tensors_in(made), strict=True):
            target = self._tensor(view)
            if name not in ALLOCATE and value.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
                target.copy_(value)
