"""The house keeps its shape: floors, rooms, sizes, and what may not be done in it.

Every test reads the source; nothing is imported but the tables of flags, schedules and optimizers. A message says which
line breaks which rule.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from draw_architecture import PICTURE, draw
from make_reading_pages import PAGE, room_page

ROOT = Path(__file__).resolve().parents[1]

# Longest prefix wins. A module may import strictly lower floors and its own room; rooms of one floor do not see each
# other.
FLOORS = {
    "megalite": 0,
    "megalite.errors": 0,
    "megalite.extras": 1,
    "megalite.progress": 1,
    "megalite.scratch": 1,
    "megalite.faults": 0,
    "megalite.streams": 0,
    "megalite.schedule": 1,
    "megalite.config": 2,
    "megalite.inventory": 3,
    "megalite.comm": 4,
    "megalite.gradient": 4,
    "megalite.microbatch": 4,
    "megalite.planner": 4,
    "megalite.launch": 5,
    "megalite.parallel.pipeline": 5,
    "megalite.parallel.tensor": 5,
    "megalite.parallel.zero": 5,
    "megalite.parallel": 5,
    "megalite.nn": 6,
    "megalite.optim": 6,
    "megalite.data": 6,
    "megalite.checkpoint": 6,
    "megalite.models": 7,
    "megalite.convert": 7,
    "megalite.observe": 8,
    "megalite.train": 9,
    "megalite.inference": 10,
    "pretrain_gpt": 11,
    "tools": 11,
    "benchmarks": 12,
}
TESTING = "megalite.testing"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# Fields of a section; another spelling of a field costs nothing.
MAX_FIELDS = {
    "model": 33,
    "parallel": 19,
    "training": 20,
    "optimizer": 17,
    "data": 16,
    "checkpoint": 14,
    "logging": 5,
}

NO_TORCH = (
    "megalite.errors",
    "megalite.extras",
    "megalite.progress",
    "megalite.faults",
    "megalite.streams",
    "megalite.schedule",
    "megalite.config",
    "megalite.inventory",
    "megalite.planner",
)
MAY_ASK = ("megalite.train.build", "megalite.observe.startup_table")
LAUNCH = "megalite.launch.launcher"
# Library modules log; these print, because that is what they are for.
PRINTERS = {
    "megalite.config.cli",
    "megalite.launch.launcher",
    "megalite.launch.watch",
    "megalite.observe.console",
}
# Calls that make an immutable value or declare something; a CapWord is the constructor of a value.
AT_IMPORT = re.compile(
    r"(\w+\.)*(getLogger|compile|fields?|option|required|frozenset|tuple|dtype|partial|float|getattr|namedtuple|NewType)"
    r"|(\w+\.)*[A-Z]\w*|[A-Z_]+\.(items|keys|values)"
)
# Who may name a schedule or an optimizer: the table and the options of optimizers (default, aliases), published runs,
# benchmarks, which name what they measure, and the oracle, which computes by itself what each of them means.
NAMES_ITS_SUBJECT = re.compile(
    r"megalite\.config\.(update_rules|optimizer|values)|tools\.(compare_published|study_staleness)"
    r"|megalite\.testing\.(oracle|update_rules)"
    r"|benchmarks\.(pipeline|megalite_step|shared_lab)"
)
UNSAFE_IMPORTS = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}
UNSAFE_CALLS = re.compile(
    r"eval|exec|torch\.(load|save)|(\w+\.)*\w+_object(_list)?|yaml\.(load|unsafe_load)|os\.system"
)
# Megatron-LM's checkpoints are pickles: a program of its own opens them, weights-only, and nothing imports that.
UNPICKLER = "megalite.convert.megatron_unpickle"
PICKLES = {(UNPICKLER, "torch.load"), ("megalite.convert.megatron_files", "torch.save")}


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _sources() -> list[Path]:
    rooms = ("megalite", "tools", "benchmarks")
    return sorted([*(path for room in rooms for path in ROOT.glob(f"{room}/**/*.py")), ROOT / "pretrain_gpt.py"])


def _everything() -> list[Path]:
    return [*_sources(), *sorted(ROOT.glob("tests/**/*.py"))]


SOURCES = {_module(path): ast.parse(path.read_text(), str(path)) for path in _sources()}
PRODUCT = {name: tree for name, tree in SOURCES.items() if not name.startswith(TESTING)}


def _room(module: str) -> str:
    """The entry of FLOORS that a module belongs to."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in FLOORS:
            return ".".join(parts[:length])
    return ""


def _imports(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Absolute names of what a module imports, wherever in the file; `from package import name` gives package.name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import; write the whole name"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def _calls(tree: ast.AST) -> Iterator[tuple[int, str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), node


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _check(problems: list[str]) -> None:
    __tracebackhide__ = True
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def test_every_module_has_a_floor() -> None:
    unknown = [name for name in PRODUCT if _room(name) in ("", "megalite") and name != "megalite"]
    _check([f"{name}: give it a floor in FLOORS" for name in unknown])


def test_modules_import_lower_floors_and_their_own_room() -> None:
    problems = []
    for module, tree in PRODUCT.items():
        room = _room(module)
        for line, name in _imports(module, tree):
            if name.split(".")[0] not in ("megalite", "tools", "benchmarks", "pretrain_gpt"):
                continue
            target = _room(name)
            # `import megalite` is the version number; a package that only groups rooms has nothing to import.
            if target in (room, "megalite") and not name.startswith(TESTING):
                continue
            if name.startswith(TESTING):
                problems.append(f"{module}:{line}: product code never imports {TESTING}")
            elif FLOORS[target] >= FLOORS[room]:
                problems.append(f"{module}:{line}: floor {FLOORS[room]} imports {name} of floor {FLOORS[target]}")
            elif room == "megalite.planner" and FLOORS[target] > 3:
                problems.append(f"{module}:{line}: the planner sees floors 0 to 3, not {name}")
    _check(problems)


def test_rooms_are_entered_by_their_doors() -> None:
    """Across rooms, names come from the room's `__init__`, which imports what others may use and nothing else."""
    doors = {room: SOURCES[room] for room in FLOORS if room in SOURCES and (ROOT / room.replace(".", "/")).is_dir()}
    offered = {room: {name.rpartition(".")[2] for _, name in _imports(room, tree)} for room, tree in doors.items()}
    asked: dict[str, set[str]] = {room: set() for room in doors}
    problems = []
    for module, tree in PRODUCT.items():
        for node in ast.walk(tree):
            if (
                not isinstance(node, ast.ImportFrom)
                or not node.module
                or _room(node.module) in (_room(module), "megalite")
            ):
                continue
            room = _room(node.module)
            if room not in doors:
                continue
            names = {alias.name for alias in node.names}
            asked[room] |= names
            if node.module != room:
                problems.append(f"{module}:{node.lineno}: {node.module} lies behind the door of {room}")
            problems += [f"{module}:{node.lineno}: {room} does not offer {name}" for name in names - offered[room]]
    _check(problems)


def test_pipeline_and_zero_never_see_layers_by_name() -> None:
    """They handle nn.Modules: no name of a layer of the transformer appears in their code."""
    layers = {"Attention", "MLP", "Block", "Embedding", "Head"}
    problems = []
    for module, tree in PRODUCT.items():
        if module.startswith(("megalite.parallel.pipeline", "megalite.parallel.zero")):
            names = {node.id: node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name)}
            problems += [f"{module}:{names[name]}: names the layer {name}" for name in layers & names.keys()]
    _check(problems)


def test_files_and_functions_are_short() -> None:
    problems = []
    for path in _everything():
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            problems.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {MAX_FILE_LINES}")
    for module, tree in SOURCES.items():
        for function in _functions(tree):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                problems.append(f"{module}:{function.lineno}: {function.name} has {lines} lines, at most 60")
    _check(problems)


def test_no_global_statement_and_no_mutable_class_state() -> None:
    problems = []
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                problems.append(f"{module}:{node.lineno}: global")
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    value = item.value if isinstance(item, ast.Assign | ast.AnnAssign) else None
                    if isinstance(value, ast.List | ast.Dict | ast.Set):
                        problems.append(f"{module}:{item.lineno}: mutable state of class {node.name}")
    _check(problems)


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Expressions evaluated when the module is imported: not in functions, lambdas or the __main__ guard."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from statement.args.defaults
            yield from (default for default in statement.args.kw_defaults if default is not None)
        elif isinstance(statement, ast.ClassDef):
            yield from _run_at_import(statement.body)
        elif isinstance(statement, ast.If):
            if "__name__" not in ast.unparse(statement.test):
                yield from [statement.test, *_run_at_import(statement.body + statement.orelse)]
        elif isinstance(statement, ast.Try):
            handlers = [inner for handler in statement.handlers for inner in handler.body]
            yield from _run_at_import(statement.body + handlers + statement.orelse + statement.finalbody)
        else:
            yield statement


def _calls_outside_lambdas(node: ast.AST) -> Iterator[ast.Call]:
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _calls_outside_lambdas(child)


def test_no_work_at_import() -> None:
    problems = []
    for module, tree in PRODUCT.items():
        for node in _run_at_import(tree.body):
            for call in _calls_outside_lambdas(node):
                if not AT_IMPORT.fullmatch(ast.unparse(call.func)) and not _finds_own_package(module, call):
                    problems.append(f"{module}:{call.lineno}: calls {ast.unparse(call.func)} at import")
    _check(problems)


def _finds_own_package(module: str, call: ast.Call) -> bool:
    """Tools and benchmarks are run as files: one line makes the package beside them importable."""
    return module.startswith(("tools", "benchmarks")) and bool(
        re.fullmatch(r"sys\.path\.(insert|append)|str|Path\(__file__\)\.(resolve|with_name)", ast.unparse(call.func))
    )


def test_torch_distributed_is_used_in_comm_and_launch_only() -> None:
    problems = []
    for module, tree in PRODUCT.items():
        # Benchmarks run torch's own parallelism beside ours: it is what they measure.
        if module.startswith(("megalite.comm", "megalite.launch", "benchmarks")):
            continue
        problems += [
            f"{module}:{line}: imports {name}; only megalite.comm and megalite.launch may"
            for line, name in _imports(module, tree)
            if name.startswith("torch.distributed")
        ]
        problems += [
            f"{module}:{node.lineno}: torch.distributed; only megalite.comm and megalite.launch may"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed")
        ]
    _check(problems)


def test_environment_is_read_in_launch_only() -> None:
    _check(
        [
            f"{module}:{node.lineno}: environment variables; only {LAUNCH} may"
            for module, tree in PRODUCT.items()
            if module != LAUNCH
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv")
        ]
    )


def test_low_floors_do_not_know_torch() -> None:
    _check(
        [
            f"{module}:{line}: imports {name}"
            for module, tree in PRODUCT.items()
            if module.startswith(NO_TORCH)
            for line, name in _imports(module, tree)
            if name.split(".")[0] == "torch"
        ]
    )


def test_nothing_that_was_read_is_executed() -> None:
    """No pickle, no torch.load, no eval: loading data, checkpoints or configurations never runs code."""
    problems = []
    for module, tree in PRODUCT.items():
        for line, name in _imports(module, tree):
            if name.split(".")[0] in UNSAFE_IMPORTS or name.startswith(UNPICKLER):
                problems.append(f"{module}:{line}: imports {name}")
        for line, name, call in _calls(tree):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if UNSAFE_CALLS.fullmatch(name) and (module, name) not in PICKLES:
                problems.append(f"{module}:{line}: calls {name}")
            if name == "torch.load" and keywords.get("weights_only") != "True":
                problems.append(f"{module}:{line}: torch.load without weights_only=True")
            for flag in ("allow_pickle", "trust_remote_code", "shell"):
                if keywords.get(flag) not in (None, "False"):
                    problems.append(f"{module}:{line}: {flag}={keywords[flag]}")
    _check(problems)


def test_the_library_logs_and_does_not_print() -> None:
    _check(
        [
            f"{module}:{line}: print in the library; use logging.getLogger(__name__)"
            for module, tree in PRODUCT.items()
            if module.startswith("megalite") and module not in PRINTERS
            for line, name, _ in _calls(tree)
            if name == "print"
        ]
    )


def test_training_does_not_branch_on_schedule_or_zero_stage() -> None:
    """The executor interprets a program and the buckets know their stage; who composes or describes may ask."""
    problems = []
    for module, tree in PRODUCT.items():
        if not module.startswith("megalite.train") or module in MAY_ASK:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Match):
                test = ast.unparse(node.subject if isinstance(node, ast.Match) else node.test)
                if re.search(r"\b(pipeline_schedule|zero_stage|parallel\.schedule)\b", test):
                    problems.append(f"{module}:{node.lineno}: branches on {test}")
    _check(problems)


def test_every_module_says_what_it_is_for() -> None:
    _check([f"{name}: no docstring" for name, tree in SOURCES.items() if not ast.get_docstring(tree)])


def test_public_functions_have_type_hints() -> None:
    problems = []
    for module, tree in SOURCES.items():
        for function in _functions(tree):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            if bare or function.returns is None:
                problems.append(f"{module}:{function.lineno}: {function.name} lacks type hints ({', '.join(bare)})")
    _check(problems)


def test_what_the_type_checker_must_not_see_has_a_reason() -> None:
    """`type: ignore[code]  # why`."""
    ignore, reason = "# type: " + "ignore", re.compile(r"# type: " + r"ignore\[[\w, -]+\]  # \w.+")
    problems = []
    for path in _sources():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if ignore in line and not reason.search(line):
                problems.append(f"{path.relative_to(ROOT)}:{number}: an ignore without its code or its reason")
    _check(problems)


def test_schedules_and_optimizers_are_named_in_their_rooms_alone() -> None:
    """Who asks what a schedule or an optimizer is like asks its entry, not its name."""
    schedule = pytest.importorskip("megalite.schedule", reason="megalite.schedule is not there")
    rules = pytest.importorskip("megalite.config.update_rules", reason="megalite.config is not there")
    names = {*schedule.SCHEDULES, *schedule.ALIASES, *rules.OPTIMIZER_SPECS}
    assert {"1f1b", "zbv", "adam"} <= names
    problems = []
    for module, tree in SOURCES.items():
        if _room(module) in ("megalite.schedule", "megalite.optim") or NAMES_ITS_SUBJECT.fullmatch(module):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in names:
                problems.append(f"{module}:{node.lineno}: {node.value!r}: ask its entry in the table")
    _check(problems)


def test_the_picture_and_the_rooms_page_are_up_to_date() -> None:
    assert PICTURE.read_text() == draw(), "docs/architecture.svg: run python tools/draw_architecture.py"
    assert PAGE.read_text() == room_page(), "docs/rooms.md: run python tools/make_reading_pages.py"


def test_no_notes_to_ourselves_and_no_machine_paths() -> None:
    words = re.compile("|".join([r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bXX" + r"X\b", r"(?<![\w.])/wo" + r"rk/"]))
    files = [p for pattern in ("scripts/*", "docs/*.md", "configs/*", "*.md", "*.toml") for p in ROOT.glob(pattern)]
    problems = []
    for path in [*_everything(), *files]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if words.search(line):
                problems.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    _check(problems)


def test_tests_mirror_the_product() -> None:
    """A folder of tests/unit and tests/distributed has the name of the room, or of tools/, that it tests."""
    problems = []
    for kind in ("unit", "distributed"):
        base = ROOT / "tests" / kind
        for path in sorted(base.glob("**/*.py")):
            folder = path.parent.relative_to(base)
            mirrored = ROOT / "megalite" / (folder if folder.parts else path.name.removeprefix("test_"))
            if not mirrored.exists() and str(folder) != "tools":
                problems.append(f"{path.relative_to(ROOT)}: no room of the product has this name")
    _check(problems)


def test_module_names_of_tests_are_unique() -> None:
    names = Counter(path.name for path in ROOT.glob("tests/**/*.py"))
    _check([f"{name}: {count} test modules have this name" for name, count in names.items() if count > 1])


def test_the_number_of_fields_is_bounded_by_section() -> None:
    config = pytest.importorskip("megalite.config.root", reason="megalite.config is not there")
    fields = {(option.section, option.field) for option in config.all_options().values()}
    counts = Counter(section for section, _ in fields)
    assert sum(counts.values()) > 40
    over = {section: count for section, count in counts.items() if count > MAX_FIELDS[section]}
    assert not over, f"{over} fields, at most {MAX_FIELDS}: merge spellings or remove a field before adding one"
