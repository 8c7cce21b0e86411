"""While it is open, this process has a GPU: tensors that are made there say so and take its paths, on CPU memory.

`Tensor.device` and its kin are replaced on the class, not by a mode: modes are off inside hooks of autograd.
"""

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megalite.rehearsal.fake_groups import FakeGroups
from megalite.rehearsal.graphs import Graph, Pool
from megalite.rehearsal.late import COMPUTE, Late
from megalite.rehearsal.messages import messages
from megalite.rehearsal.order import Clock, where
from megalite.rehearsal.stand_ins import flash_attention, fused_rms_norm
from megalite.rehearsal.streams import DEVICE, Event, Gpu, Stream
from megalite.rehearsal.values import Shapes
from megalite.rehearsal.watch import Computed, Watch

CHOSEN = MappingProxyType({"scaled_dot_product_attention": flash_attention, "rms_norm": fused_rms_norm})
"""Kernels that torch chooses by the device, and would choose otherwise where there is no memory."""
CONSTANTS: Mapping[str, Any] = MappingProxyType({
    "set_device": None, "current_device": 0, "device_count": 1, "is_available": True, "is_initialized": True,
    "_lazy_init": None, "get_device_name": "bookkeeping", "mem_get_info": (1 << 40, 1 << 40), "memory_stats": {},
    "get_device_properties": SimpleNamespace(uuid="0", total_memory=1 << 40), "get_device_capability": (9, 0),
    "reset_peak_memory_stats": None,
})  # fmt: skip
"""What functions of torch.cuda return."""
A_WHILE = 0.05
"""Seconds after which a thread begins by itself, where work is put off."""
_DATA_PTR = torch.UntypedStorage.data_ptr


@contextmanager
def watched_gpu(fake: FakeGroups | None = None, *, late: str | None = None) -> Iterator[Gpu]:
    """A GPU that finds races. Process groups are made before or inside; they say nccl.

    fake: of a rank that is alone: its device has no values (`values.py`), and nobody answers its messages. late: which
    streams work as late as they may (`late.py`).
    """
    gpu = Gpu("cpu" if fake is None else "meta")
    rounding = importlib.import_module("megalite.parallel.tensor.float8_kernels")
    parts = importlib.import_module("megalite.library.parts")
    eager = rounding.Kernels()  # nothing is compiled for a device that is not there
    gpu.kernels = Shapes(gpu) if fake is not None else Computed() if late is None else Late(gpu, late=late == COMPUTE)
    with ExitStack() as stack:
        for owner, names in (
            (torch.cuda, _cuda(gpu)),
            (Tensor, _tensor(gpu)),
            (torch.UntypedStorage, _storage(gpu)),
            (ThreadPoolExecutor, {"submit": _submit(gpu)}),
            (torch, {"tensor": _made(gpu, torch.tensor)}),
            (torch.nn.functional, {} if fake is None else CHOSEN),
            (rounding, {"kernels_on": lambda device_type: eager}),
            (parts, {"crossings": aside(gpu, parts.crossings)}),
            (torch.optim.Optimizer, {"_group_tensors_by_device_and_dtype": _grouped(gpu)}),
        ):
            for name, value in names.items():
                stack.enter_context(patch.object(owner, name, value, create=True))
        stack.enter_context(messages(gpu, fake))
        stack.enter_context(Watch(gpu))
        yield gpu


def aside(gpu: Gpu, function: Callable[..., Any], **state: bool) -> Callable[..., Any]:
    """The function, which asks somebody's layers for shapes by tensors on meta, or fake ones of torch.export: what
    these layers make there is on no device, though it looks as what torch makes for tensors of ours."""

    def seen(*given: Any) -> Any:
        with gpu.state(quiet=True, **state):
            return function(*given)

    return seen


def _cuda(gpu: Gpu) -> dict[str, Any]:
    """Names of torch.cuda."""

    @contextmanager
    def entered(stream: Stream | None) -> Iterator[None]:
        with nullcontext() if stream is None else gpu.state(current=stream):
            yield

    def lock(at: int, size: int, flags: int) -> int:
        gpu.ledger.locked.add(at)
        return 0

    driver = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=gpu.ledger.locked.discard)
    return {
        "Stream": lambda device=None, **_: Stream(gpu, f"the stream that {where().partition(' < ')[0]} made"),
        "Event": lambda **_: Event(gpu),
        "CUDAGraph": lambda: Graph(gpu),
        "graph_pool_handle": Pool,
        "stream": entered,
        "current_stream": lambda device=None: gpu.current,
        "default_stream": lambda device=None: gpu.compute,
        "synchronize": lambda device=None: gpu.host_waits(),
        "cudart": lambda: driver,
        "device": lambda device: nullcontext(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "max_memory_allocated": lambda device=None: gpu.ledger.peak,
        "memory_allocated": lambda device=None: gpu.ledger.allocated,
        **{name: lambda *_, value=value: value for name, value in CONSTANTS.items()},
    }


def _tensor(gpu: Gpu) -> dict[str, Any]:
    """Names of torch.Tensor."""
    device_of, really_to = Tensor.device.__get__, Tensor.to

    def device(x: Tensor) -> torch.device:
        true: torch.device = device_of(x)
        return DEVICE if not gpu.true_device and true.type == gpu.place.type and gpu.on_device(x) else true

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        values = [*args, *kwargs.values()]
        wanted = [torch.device(v) for v in values if isinstance(v, (torch.device, str))]
        wanted += [v.device for v in values if isinstance(v, Tensor)]
        if gpu.true_device or gpu.quiet or not wanted or wanted[0].type == "meta":
            return really_to(x, *args, **kwargs)
        if device_of(x).type != "cpu" and not gpu.on_device(x):
            return really_to(x, *args, **kwargs)
        dtypes = [v.dtype if isinstance(v, Tensor) else v for v in values if isinstance(v, (Tensor, torch.dtype))]
        dtype = dtypes[0] if dtypes else x.dtype
        if wanted[0].type == device(x).type:
            return really_to(x, dtype, copy=bool(kwargs.get("copy")))
        free = bool(kwargs.get("non_blocking") or any(v is True for v in args[-2:]))
        with gpu.state(on_its_way=True):
            moved: Tensor = torch.ops.aten._to_copy(x, dtype=dtype, device=wanted[0], non_blocking=free)
        return moved

    def pinned(x: Tensor, *_: Any) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)

    def record_stream(x: Tensor, stream: Stream) -> None:
        gpu.ledger.of(x).recorded.add(stream.line.number)
        gpu.kernels.keep(x, stream.line)

    return {
        "device": property(device),
        "is_cuda": property(lambda x: device(x).type == "cuda"),
        "is_meta": property(lambda x: device(x).type == "meta"),
        "is_cpu": property(lambda x: device(x).type == "cpu"),
        "to": to,
        "cpu": lambda x: to(x, "cpu"),
        "cuda": lambda x, *_, non_blocking=False: to(x, DEVICE, non_blocking=non_blocking),
        "pin_memory": pinned,
        "is_pinned": lambda x, *_: gpu.ledger.of(x).pinned,
        "record_stream": record_stream,
        "numpy": _read(gpu, Tensor.numpy),
        "tolist": _read(gpu, Tensor.tolist),
        "data_ptr": lambda x: _address(gpu, x.untyped_storage()) + x.storage_offset() * x.element_size(),
        "new_tensor": lambda x, data, **_: torch.tensor(data, dtype=x.dtype, device=x.device),
    }


def _address(gpu: Gpu, storage: torch.UntypedStorage) -> int:
    """Where it is; without memory, a number that no other has."""
    memory = gpu.ledger.find(storage)
    if memory is None or storage.device.type == "cpu":
        return _DATA_PTR(storage)
    return memory.number << 44


def _read(gpu: Gpu, real: Callable[..., Any]) -> Callable[..., Any]:
    """What reads a tensor without a kernel."""

    def read(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not gpu.quiet and not gpu.true_device:
            if gpu.on_device(x):
                assert real.__name__ != "numpy", "numpy() of a tensor on the device"
                gpu.current.synchronize(f"{real.__name__}()")
            gpu.ledger.work(gpu.ledger.host, real.__name__, [x], [])
            if gpu.on_device(x) and gpu.place.type == "meta":
                x = gpu.kernels.read(x)
        return real(x, *args, **kwargs)

    return read


def _storage(gpu: Gpu) -> dict[str, Any]:
    """Names of torch.UntypedStorage."""
    resize, device_of = torch.UntypedStorage.resize_, torch.UntypedStorage.device.__get__

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        memory = gpu.ledger.find(storage)
        if memory is not None and not gpu.quiet:
            gpu.kernels.settle(gpu.current.line.clock)
            gpu.ledger.resized(memory, gpu.current.line, nbytes)
        out = resize(storage, nbytes)
        if memory is not None:
            gpu.kernels.changes([memory])
        return out

    def there(storage: torch.UntypedStorage) -> bool:
        memory = gpu.ledger.find(storage)
        return memory is not None and memory.on_device

    return {
        "resize_": resized,
        "data_ptr": lambda storage: _address(gpu, storage),
        "is_cuda": property(there),
        "device": property(lambda x: DEVICE if there(x) else device_of(x) if gpu.true_device else torch.device("cpu")),
    }


def _made(gpu: Gpu, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor`, which copies below the modes."""

    def tensor(data: Any, *, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = real(data, **kwargs)
        made = made.pin_memory() if pin_memory else made
        return made if device is None else made.to(device)

    return tensor


def _grouped(gpu: Gpu) -> Any:
    """What torch's optimizers ask for devices, in C++."""
    real = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def group(lists: Any, with_indices: bool = False) -> Any:
        made = real(lists, with_indices)
        return {(lists[0][0].device, dtype): value for (_, dtype), value in made.items()}

    return staticmethod(group)


def _submit(gpu: Gpu) -> Callable[..., Any]:
    """Work of a thread of the host begins with what its caller knows; who asks for its end knows what it knew."""
    real = ThreadPoolExecutor.submit

    def learning(ask: Callable[..., Any], known: Clock, asked_for: threading.Event) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            asked_for.set()
            answer = ask(*args, **kwargs)
            gpu.ledger.host.learn(known)
            return answer

        return asked

    def submit(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        given, known = dict(gpu.ledger.host.clock), Clock()

        def run() -> Any:
            gpu.ledger.host.learn(given)
            with Watch(gpu):
                try:
                    return function(*args, **kwargs)
                finally:
                    known.update(gpu.ledger.host.clock)

        asked = threading.Event()
        future = real(pool, lambda: (asked.wait(gpu.kernels.puts_off * A_WHILE), run())[1])
        for name in ("result", "exception", "done"):
            setattr(future, name, learning(getattr(future, name), known, asked))
        return future

    return submit
