"""Hardware as data: `hardware/NAME.yaml` beside this file, or a file of the user's own; `devices.yaml` knows which
device is which.

Rates are what data sheets say; the efficiencies beside them are what well-written programs reach of them (measured runs
published by others, or `tools/profile_layers.py`). Bandwidths are bytes per second of one device in one direction.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megalite.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """Between two devices."""

    bandwidth: float  # bytes per second of one device in one direction
    latency: float  # seconds of one message


@dataclass(frozen=True)
class Hardware:
    """One kind of node. Files may leave out what has a default."""

    name: str
    kind: str
    devices_per_node: int
    memory_bytes: float
    reserved_bytes: float  # of a device, what driver, libraries and fragmentation take
    matrix_flops: Mapping[str, float]  # precision -> dense FLOP/s; fp8 where it is known
    matrix_efficiency: float  # part of it that large products reach
    matrix_half_size: float  # the smallest extent of a product at which half of that is left
    attention_efficiency: float  # the same for fused attention
    memory_bandwidth: float  # bytes/s
    memory_efficiency: float  # the reachable part
    kernel_overhead: float  # seconds of starting one kernel that nothing hides
    action_overhead: float  # of a stage's pass, besides its kernels
    intra_node: Link
    inter_node: Link
    overlap: float  # part of a transfer that can hide behind computation
    power: float  # watts of one device with its share of the node
    multiprocessors: float = 0  # each computes a tile of a product (0: no tiles, and matrix_half_size counts)
    tile_latency: float = 0.0  # seconds in which a tile begins
    host_memory_bytes: float = 0.0  # of a node's host, as all that follows; 0 where not known
    host_link: float = 0.0  # bytes/s between one device and its host
    host_copy: float = 0.0  # bytes/s of all its devices together (a copy reads and writes: both count)
    disk_read: float = 0.0  # the same of its disk
    disk_write: float = 0.0
    # What a profile found between processes of one node, by operation (all_reduce, gather, send); not in the files.
    measured: Mapping[str, Link] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.kind == "cpu"

    def host_transfer(self, nbytes: float) -> float:
        """Seconds of a copy to or from the host; where that is not known, as fast as to a neighbour."""
        return nbytes / (self.host_link or self.intra_node.bandwidth)

    @property
    def usable_bytes(self) -> float:
        """Device memory for tensors."""
        return self.memory_bytes - self.reserved_bytes


def _folder() -> Path:
    return Path(__file__).parent / "hardware"


def available() -> list[str]:
    """Names that `load_hardware` knows."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def load_hardware(name_or_file: str, *, devices_per_node: int | None = None) -> Hardware:
    """A description by name (`h100`) or from a file.

    Raises:
        ConfigError: no such name or file, or a broken one.
    """
    path = Path(name_or_file)
    if not path.suffix:
        path = _folder() / f"{name_or_file.lower()}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"`hardware`={name_or_file}: no such hardware; one of {', '.join(available())}, or a YAML file like theirs"
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"`hardware`={name_or_file}: not a YAML file ({str(error).splitlines()[0]})") from error
    hardware = parse_hardware(data, name_or_file)
    return hardware if devices_per_node is None else replace(hardware, devices_per_node=devices_per_node)


def load_cluster(name_or_file: str, devices: int, *, devices_per_node: int | None = None) -> list[tuple[int, Hardware]]:
    """(Devices, their kind), neighbours of one kind together: `devices` of one kind, or what a file says that has
    nothing but `classes: [{hardware: NAME|FILE, devices: N}, ...]`, in the order of ranks.

    Raises ConfigError as `load_hardware`, and where the classes do not add up to `devices`.
    """
    path, rows = Path(name_or_file), None
    if path.suffix and path.is_file():
        with suppress(yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError):  # `load_hardware` says what is wrong
            rows = yaml.safe_load(path.read_text(encoding="utf-8"))["classes"]
    if rows is None:
        return [(devices, load_hardware(name_or_file, devices_per_node=devices_per_node))]
    listed, keys = rows if isinstance(rows, list) else [], {"hardware", "devices"}
    numbers = [row["devices"] for row in listed if isinstance(row, dict) and set(row) == keys]
    if not numbers or len(numbers) < len(listed) or any(type(number) is not int or number < 1 for number in numbers):
        raise ConfigError(f"`hardware`={name_or_file}: classes: expected a list of {{hardware: NAME, devices: N}}")
    if (total := sum(numbers)) != devices:
        raise ConfigError(f"`hardware`={name_or_file}: its classes have {total} devices; use `num_devices` {total}")
    return [(row["devices"], load_hardware(str(row["hardware"]), devices_per_node=devices_per_node)) for row in rows]


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s that one device could do at best in bf16 or fp16: what MFU, the share of the possible that a run reaches,
    is measured against. None where that is not known (other precisions; a CPU, whose peak depends on clocks and
    instruction sets that its name does not tell)."""
    found = _listed(device_name) if precision in ("bf16", "fp16") else None
    return load_hardware(found).matrix_flops[precision] if isinstance(found, str) else found


def hardware_of(device_name: str) -> Hardware | None:
    """The description of a device that its driver names so; None where there is none."""
    found = _listed(device_name)
    return load_hardware(found) if isinstance(found, str) else None


def _listed(device_name: str) -> str | float | None:
    """Its description's name, or its rate where that is all that is known."""
    known = yaml.safe_load((Path(__file__).parent / "devices.yaml").read_text(encoding="utf-8"))
    found = next((entry for name, entry in known.items() if name in device_name), None)
    return found if found is None or isinstance(found, str) else float(found)


_Reader = Callable[[Any, str, list[str]], Any]


def parse_hardware(data: Any, where: str) -> Hardware:
    """Build a description from a file's content. Raises ConfigError with every problem."""
    if not isinstance(data, dict):
        raise ConfigError(f"`hardware`={where}: expected a mapping of names to numbers")
    problems: list[str] = []
    names = {entry.name: entry.default for entry in fields(Hardware) if entry.name != "measured"}
    given = {name: data.get(name, None if default is MISSING else default) for name, default in names.items()}
    readers: dict[str, _Reader] = {**dict.fromkeys(names, _number), "name": _text, "kind": _text}
    readers |= {"intra_node": _link, "inter_node": _link, "matrix_flops": _rates}
    values = {name: readers[name](raw, name, problems) for name, raw in given.items()}
    known = {*names, "source"}
    problems += [f"{name}: unknown" for name in data if name not in known]
    if values["kind"] not in ("cuda", "cpu"):
        problems.append(f"kind: {values['kind']}; cuda (any GPU) or cpu")
    if problems:
        raise ConfigError([f"`hardware`={where}: {problem}" for problem in problems])
    values["devices_per_node"] = int(values["devices_per_node"])
    return Hardware(**values)


def _text(raw: Any, *_: object) -> str:
    return str(raw)


def _number(raw: Any, name: str, problems: list[str]) -> float:
    try:
        number = float(raw)
    except (TypeError, ValueError):
        problems.append(f"{name}: expected a number, got {raw!r}")
        return 1.0
    if number < 0 or (number == 0 and name in ("devices_per_node", "memory_bandwidth", "memory_bytes", "bandwidth")):
        problems.append(f"{name}: {raw} is too small")
    return number


def _link(raw: Any, name: str, problems: list[str]) -> Link:
    if not isinstance(raw, dict) or set(raw) != {"bandwidth", "latency"}:
        problems.append(f"{name}: expected bandwidth (bytes/s) and latency (s)")
        return Link(1.0, 0.0)
    return Link(_number(raw["bandwidth"], "bandwidth", problems), _number(raw["latency"], "latency", problems))


def _rates(raw: Any, _: str, problems: list[str]) -> dict[str, float]:
    names = ("bf16", "fp16", "fp32", "fp64")
    if not isinstance(raw, dict) or set(raw) - {"fp8"} != set(names):
        problems.append(f"matrix_flops: expected FLOP/s of {', '.join(names)} (and fp8)")
        return dict.fromkeys(names, 1.0)
    return {name: _number(rate, f"matrix_flops.{name}", problems) for name, rate in raw.items()}
