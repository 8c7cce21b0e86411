"""What other people made: read here, and none of it run.

A model or tokenizer of Hugging Face's may name programs beside it (`auto_map`), which transformers runs once somebody
says yes to a question on the terminal; a data set may be a program. This is the one door to whatever loads a folder or
a name of theirs: it never says yes, and asks nobody. Pickles and chat templates, which are programs too, are opened by
`FencedProgram` in a process of its own.
"""

import json
import sys
import weakref
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any, cast

from megalite.errors import ConfigError, DataError
from megalite.extras import optional_package
from megalite.files import hub_advice

#: Where transformers looks for programs, and what stands there.
PROGRAMS = "auto_map"
#: Read whole, and parsed at some twenty times its size.
MOST_JSON = 64 << 20


class FencedProgram:
    """A program of ours in a process of its own, which lives as long as this object; it answers requests with lines."""

    def __init__(self, program: Path) -> None:
        # -P: nothing beside that program is importable by accident
        self.process = Popen([sys.executable, "-P", str(program)], stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        self.close = weakref.finalize(self, _close, self.process)

    def send(self, request: bytes) -> None:
        """Writes a request. Where the process has ended, its answer will be missing."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
        except OSError:
            pass

    def line(self, most: int = -1) -> bytes | None:
        """The next line of its answer, `most` bytes at most; None where the process has ended or the line is longer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline(most)
        return line if line.endswith(b"\n") else None

    def fill(self, into: memoryview) -> bool:
        """Reads the next bytes of its answer; False where the process has ended before."""
        stdout = cast(BufferedReader, self.process.stdout)
        while into:
            count = stdout.readinto(into)
            if not count:
                return False
            into = into[count:]
        return True

    def status(self) -> int:
        """The exit status of the process, which is killed where it is still at work."""
        return _status(self.process)


def _status(process: Popen[bytes]) -> int:
    try:
        return process.wait(1)
    except TimeoutExpired:
        process.kill()
        return process.wait()


def _close(process: Popen[bytes]) -> None:
    """Ends the process: by itself, once no more requests come, or by a signal."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.close()
    except OSError:
        pass  # it has ended already
    process.stdout.close()
    _status(process)


def read_limited(path: str | Path, flag: str, most: int) -> bytes:
    """Content of a file that `flag` names, `most` bytes at most. Raises DataError."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise DataError(f"{flag}={path}: is not a file; name one")
        with open(path, "rb") as file:
            content = file.read(most + 1)
    except FileNotFoundError:
        advice = hub_advice(str(path))
        raise DataError(f"{flag}={path}: no such file{f'; {advice}' * bool(advice)}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{flag}={path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(content) > most:
        raise DataError(f"{flag}={path}: larger than {most >> 20} MiB, which none of its kind is; name another file")
    return content


def read_mapping(path: Path, flag: str) -> dict[str, Any]:
    """The JSON object of a file that may be missing. Raises DataError."""
    if not path.exists():
        return {}
    try:
        found = json.loads(read_limited(path, flag, MOST_JSON))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{flag}={path}: not JSON ({str(error)[:80]}); repair it") from None
    if not isinstance(found, dict):
        raise DataError(f"{flag}={path}: not a JSON object but {type(found).__name__}; repair it")
    return found


def check_no_program(path: Path, named: Any, flag: str) -> None:
    """Raises ConfigError where `named`, the `auto_map` of the file `path`, is one."""
    if not named:
        return
    each = named.values() if isinstance(named, Mapping) else named if isinstance(named, list | tuple) else [named]
    first = next((str(name) for entry in each for name in (entry if isinstance(entry, list) else [entry]) if name), "")
    raise ConfigError(
        f"{flag}={path.parent}: {path.name} names a program to run ({PROGRAMS}: {first[:60]!r}), which is not done; "
        f"take a folder without one, or remove {PROGRAMS} there if the other files say all"
    )


def load_causal_model(folder: Path, architecture: str, dtype: Any, flag: str) -> Any:
    """transformers' own class of that name with the weights of `folder`: safetensors, no adapters, nobody's kernels.

    Raises ConfigError where a program would have to run, or transformers refuses the folder.
    """
    transformers = optional_package(flag, "transformers")
    check_model_folder(folder, flag)
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        return getattr(transformers, architecture).from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="eager",
            dtype=dtype,
        )
    except Exception as error:  # the package raises many kinds
        said = " ".join(str(error).split())[:160] or type(error).__name__
        raise ConfigError(f"{flag}={folder}: transformers cannot load it ({said})") from None
    finally:
        if shown:
            bars.enable_progress_bar()


def check_model_folder(folder: Path, flag: str) -> None:
    """Raises ConfigError where transformers would need a program of the folder's maker, or would look elsewhere."""
    for name in ("config.json", "generation_config.json"):
        check_no_program(folder / name, read_mapping(folder / name, flag).get(PROGRAMS), flag)
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"{flag}={folder}: adapter_config.json names another model, which would be read; remove it")


def open_dataset(path: str, flag: str, named: tuple[str, str | None, str] | None = None) -> Any:
    """A folder written by `datasets.save_to_disk`, or what `datasets` finds under (name, config, split), streamed; a
    data set that is a program is refused. Raises DataError."""
    datasets = optional_package(f"{flag}={path}", "datasets")
    try:
        if named is None:
            return datasets.load_from_disk(path)
        name, config, split = named
        return datasets.load_dataset(name, config, split=split, streaming=True, trust_remote_code=False)
    except Exception as error:  # the package raises many kinds
        said = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise DataError(f"{flag}={path}: datasets cannot load it ({said})") from None
