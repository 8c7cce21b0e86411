"""What may not be done in the house: globals, work at import, pickles, prints, names of machines.

Every test reads the source; nothing is imported but the tables of schedules and optimizers. A message says which line
breaks which rule.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from source_tree import (
    PRODUCT,
    ROOT,
    SOURCES,
    calls,
    check,
    everything,
    functions,
    imports,
    literals,
    nodes,
    room_of,
    sources,
)

MAY_ASK = ("megalite.train.build", "megalite.planner.startup_table")
LAUNCH = "megalite.launch.launcher"
# Library modules log; these print, because that is what they are for.
PRINTERS = {
    "megalite.extras",
    "megalite.config.cli",
    "megalite.launch.launcher",
    "megalite.launch.output",
    "megalite.launch.watch",
}
# Calls that make an immutable value or declare something; a CapWord is the constructor of a value.
AT_IMPORT = re.compile(
    r"(\w+\.)*(getLogger|compile|fields?|option|required|frozenset|tuple|dtype|partial|float|getattr|device|namedtuple|NewType)"
    r"|flush_schedule"
    r"|(\w+\.)*[A-Z]\w*|[A-Z_]+\.(items|keys|values)"
)
# Who may name a schedule or an optimizer: the table and the options of optimizers (default, aliases), published runs,
# benchmarks, which name what they measure, and the oracle, which computes by itself what each of them means.
NAMES_ITS_SUBJECT = re.compile(
    r"megalite\.config\.(update_rules|optimizer|values)|tools\.(compare_published|study_staleness)"
    r"|megalite\.testing\.(oracle|update_rules|preconditioned)"
    r"|benchmarks\.(gpu|pipeline|megalite_step|shared_lab|single|tiers)"
)
# Who speaks to a command line: the parser and its help, the spelling itself, what runs commands and compares them.
FACES = (
    "megalite.config.cli",
    "megalite.config.reader",
    "megalite.config.usage",
    "megalite.errors",
    "megalite.proof",
    "megalite.testing",
    "tools",
    "benchmarks",
    "scripts",
    "pretrain_gpt",
)
COMMAND = re.compile(r"(?:tools/\w+\.py|pretrain_gpt\.py|hf download)(?: [^\s;,)]+)*")
UNSAFE_IMPORTS = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}
UNSAFE_CALLS = re.compile(
    r"eval|exec|torch\.(load|save)|(\w+\.)*\w+_object(_list)?|yaml\.(load|unsafe_load)|os\.system"
)
# Megatron-LM's checkpoints are pickles: a program of its own opens them, weights-only, and nothing imports that.
UNPICKLER = "megalite.convert.megatron_unpickle"
# What loads a folder or a name of other people, and may run a program that lies there.
LOADS_STRANGERS = re.compile(
    r"(.*\.)?(\w*from_pretrained|load_from_disk|load_dataset|get_class_from_dynamic_module|\w+_download)"
)
STRANGERS = "megalite.strangers"
# Writes the files of torch.distributed.checkpoint, in one process, by torch's own writer.
DCP_WRITER = "megalite.convert.dcp_writing"
PICKLES = {
    (UNPICKLER, "torch.load"), ("megalite.convert.megatron_writing", "torch.save"),
    (DCP_WRITER, "torch.save"),
}  # fmt: skip


def test_no_global_statement_and_no_mutable_class_state() -> None:
    problems = []
    for module, tree in SOURCES.items():
        for node in nodes(tree):
            if isinstance(node, ast.Global):
                problems.append(f"{module}:{node.lineno}: global")
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    value = item.value if isinstance(item, ast.Assign | ast.AnnAssign) else None
                    if isinstance(value, ast.List | ast.Dict | ast.Set):
                        problems.append(f"{module}:{item.lineno}: mutable state of class {node.name}")
    check(problems)


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
    check(problems)


def _finds_own_package(module: str, call: ast.Call) -> bool:
    """Tools and benchmarks are run as files: one line makes the package beside them importable."""
    if (
        module in ("pretrain_gpt", "tools.command_line", "tools.profile_layers")
        and ast.unparse(call.func) == "require_core"
    ):
        return True  # its own imports would end in a traceback where a core package is missing
    return module.startswith(("tools", "benchmarks")) and bool(
        re.fullmatch(r"sys\.path\.(insert|append)|str|Path\(__file__\)\.(resolve|with_name)", ast.unparse(call.func))
    )


def test_torch_distributed_is_used_in_comm_and_launch_only() -> None:
    problems = []
    for module, tree in PRODUCT.items():
        # Benchmarks run torch's own parallelism beside ours, doctor.py tries what a run would be built on, and a
        # rehearsal puts its own in the place of torch's.
        users = (
            "megalite.comm",
            "megalite.launch",
            "megalite.rehearsal.messages",
            "benchmarks",
            "tools.collective_test",
        )
        if module.startswith((*users, DCP_WRITER)):
            continue
        problems += [
            f"{module}:{line}: imports {name}; only megalite.comm and megalite.launch may"
            for line, name in imports(module, tree)
            if name.startswith("torch.distributed")
        ]
        problems += [
            f"{module}:{node.lineno}: torch.distributed; only megalite.comm and megalite.launch may"
            for node in nodes(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed")
        ]
    check(problems)


def test_copies_between_device_and_host_are_made_by_the_mover() -> None:
    """In the rooms of parallelism: who starts one on a stream of its own has a rule of lifetime of its own."""
    names = {"Stream", "wait_stream", "record_stream", "pin_memory"}
    check(
        [
            f"{module}:{node.lineno}: {node.attr}; let `Mover` make the copy (megalite/parallel/tiers)"
            for module, tree in PRODUCT.items()
            if module.startswith("megalite.parallel.") and module != "megalite.parallel.tiers.mover"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in names
        ]
    )


def test_what_other_people_made_enters_by_one_door() -> None:
    """transformers, datasets and peft run programs of whoever made a folder, once asked to or not told otherwise."""
    problems = []
    for module, tree in PRODUCT.items():
        problems += [
            f"{module}:{line}: {name}; only {STRANGERS} may"
            for line, name, _ in calls(tree)
            if LOADS_STRANGERS.fullmatch(name) and module != STRANGERS
        ]
        if module == STRANGERS:
            trusts = [
                ast.unparse(k.value) for _, _, call in calls(tree) for k in call.keywords if "trust" in str(k.arg)
            ]
            assert trusts and set(trusts) == {"False"}
    check(problems)


def test_environment_is_read_in_launch_only() -> None:
    check(
        [
            f"{module}:{node.lineno}: environment variables; only {LAUNCH} may"
            for module, tree in PRODUCT.items()
            if module != LAUNCH
            for node in nodes(tree)
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv")
        ]
    )


def test_nothing_that_was_read_is_executed() -> None:
    """No pickle, no torch.load, no eval: loading data, checkpoints or configurations never runs code."""
    problems = []
    for module, tree in PRODUCT.items():
        for line, name in imports(module, tree):
            if name.split(".")[0] in UNSAFE_IMPORTS or name.startswith(UNPICKLER):
                problems.append(f"{module}:{line}: imports {name}")
        for line, name, call in calls(tree):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if UNSAFE_CALLS.fullmatch(name) and (module, name) not in PICKLES:
                problems.append(f"{module}:{line}: calls {name}")
            if name == "torch.load" and keywords.get("weights_only") != "True":
                problems.append(f"{module}:{line}: torch.load without weights_only=True")
            for flag in ("allow_pickle", "trust_remote_code", "shell"):
                if keywords.get(flag) not in (None, "False"):
                    problems.append(f"{module}:{line}: {flag}={keywords[flag]}")
    check(problems)


def test_the_library_logs_and_does_not_print() -> None:
    check(
        [
            f"{module}:{line}: print in the library; use logging.getLogger(__name__)"
            for module, tree in PRODUCT.items()
            if module.startswith("megalite") and module not in PRINTERS
            for line, name, _ in calls(tree)
            if name == "print"
        ]
    )


def test_only_faces_write_flags() -> None:
    """A message names a setting by its field; who shows it spells it. A command of a tool is text like any other."""
    problems = []
    for name, tree in PRODUCT.items():
        if not name.startswith(FACES):
            problems += [
                f"{name}:{line}: {text!r}: name the setting in backquotes (megalite.errors)"
                for line, text in literals(tree)
                if re.search(r"(?<![\w<-])--(?:[a-z]|$)", COMMAND.sub("", text))
            ]
    check(problems)


def test_one_place_names_a_rank_with_its_host() -> None:
    """Or a search of the logs for a rank that was lost finds half of what was said of it."""
    problems = []
    for module, tree in PRODUCT.items():
        for node in nodes(tree):
            if isinstance(node, ast.JoinedStr) and module != "megalite.errors":
                text = ast.unparse(node)
                if re.search(r"(?<!pipeline )\brank \{[^}]*\} (\((host )?|on )\{[^}]*host", text):
                    problems.append(f"{module}:{node.lineno}: {text[:60]}: call errors.rank_name")
    check(problems)


def test_training_does_not_branch_on_schedule_or_zero_stage() -> None:
    """The executor interprets a program and the buckets know their stage; who composes or describes may ask."""
    problems = []
    for module, tree in PRODUCT.items():
        if not module.startswith("megalite.train") or module in MAY_ASK:
            continue
        for node in nodes(tree):
            if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Match):
                test = ast.unparse(node.subject if isinstance(node, ast.Match) else node.test)
                if re.search(r"\b(pipeline_schedule|zero_stage|parallel\.schedule)\b", test):
                    problems.append(f"{module}:{node.lineno}: branches on {test}")
    check(problems)


def test_every_module_says_what_it_is_for() -> None:
    check([f"{name}: no docstring" for name, tree in SOURCES.items() if not ast.get_docstring(tree)])


def test_public_functions_have_type_hints() -> None:
    problems = []
    for module, tree in SOURCES.items():
        for function in functions(tree):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            if bare or function.returns is None:
                problems.append(f"{module}:{function.lineno}: {function.name} lacks type hints ({', '.join(bare)})")
    check(problems)


def test_what_the_type_checker_must_not_see_has_a_reason() -> None:
    """`type: ignore[code]  # why`."""
    ignore, reason = "# type: " + "ignore", re.compile(r"# type: " + r"ignore\[[\w, -]+\]  # \w.+")
    problems = []
    for path in sources():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if ignore in line and not reason.search(line):
                problems.append(f"{path.relative_to(ROOT)}:{number}: an ignore without its code or its reason")
    check(problems)


def test_schedules_and_optimizers_are_named_in_their_rooms_alone() -> None:
    """Who asks what a schedule or an optimizer is like asks its entry, not its name."""
    schedule = pytest.importorskip("megalite.schedule", reason="megalite.schedule is not there")
    rules = pytest.importorskip("megalite.config.update_rules", reason="megalite.config is not there")
    names = {*schedule.SCHEDULES, *schedule.ALIASES, *rules.OPTIMIZER_SPECS}
    assert {"1f1b", "zbv", "adam"} <= names
    problems = []
    for module, tree in SOURCES.items():
        if room_of(module) in ("megalite.schedule", "megalite.optim") or NAMES_ITS_SUBJECT.fullmatch(module):
            continue
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and node.value in names:
                problems.append(f"{module}:{node.lineno}: {node.value!r}: ask its entry in the table")
    check(problems)


def test_no_notes_to_ourselves_and_no_machine_paths() -> None:
    words = re.compile("|".join([r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bXX" + r"X\b", r"(?<![\w.])/wo" + r"rk/"]))
    files = [p for pattern in ("scripts/*", "docs/*.md", "configs/*", "*.md", "*.toml") for p in ROOT.glob(pattern)]
    problems = []
    for path in [*everything(), *(path for path in files if path.is_file())]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if words.search(line):
                problems.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    check(problems)
