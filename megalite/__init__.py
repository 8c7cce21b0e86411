"""megalite: a lean, pure-PyTorch framework for pretraining GPT models with Megatron-style parallelism.

As a library: `Pipeline`, `ShardedOptimizer` and `run` put modules of your own into its engine (`megalite.library`); the
other names are what goes with them. Each is imported when it is first used, so that `import megalite` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megalite.comm import ParallelMesh, World
    from megalite.errors import ConfigError, MegaliteError, RuntimeFailure, ScheduleError
    from megalite.library import Pipeline, ShardedOptimizer, layers_from_module, read_weights, run, time_layers
    from megalite.rehearsal import rehearse
    from megalite.schedule import (
        SCHEDULES,
        Program,
        build_program,
        load_program,
        parse_program,
        render_svg,
        render_text,
        simulate,
        validate,
    )

_ROOMS = {
    "comm": ("ParallelMesh", "World"),
    "errors": ("ConfigError", "MegaliteError", "RuntimeFailure", "ScheduleError"),
    "library": ("Pipeline", "ShardedOptimizer", "layers_from_module", "read_weights", "run", "time_layers"),
    "rehearsal": ("rehearse",),
    "schedule": (
        "SCHEDULES", "Program", "build_program", "load_program", "parse_program", "render_svg", "render_text",
        "simulate", "validate",
    ),
}  # fmt: skip
_HOME = {name: f"megalite.{room}" for room, names in _ROOMS.items() for name in names}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'megalite' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
