"""The commands of an installed megalite: `megalite-plan` runs what `python tools/plan.py` runs in a clone.

A wheel holds `pretrain_gpt.py` and the tools for users in `megalite/scripts/`; pyproject.toml lists them and the
commands. Under a launcher that starts a Python program: `torchrun -m megalite.commands pretrain ...`.
"""

import runpy
import sys
from pathlib import Path

COMMANDS = {
    "pretrain": "pretrain_gpt.py",
    "convert": "tools/convert_checkpoint.py",
    "doctor": "tools/doctor.py",
    "evaluate": "tools/evaluate.py",
    "generate": "tools/generate_text.py",
    "inspect": "tools/inspect_checkpoint.py",
    "plan": "tools/plan.py",
    "preprocess-data": "tools/preprocess_data.py",
    "prove-layout": "tools/prove_layout.py",
    "replay": "tools/replay.py",
    "report": "tools/report.py",
    "show-schedule": "tools/show_schedule.py",
    "train-tokenizer": "tools/train_tokenizer.py",
}


def main() -> None:
    """Runs the script that the program's name (`megalite-plan`) or else the first argument (`plan`) says."""
    name = Path(sys.argv[0]).stem.removeprefix("megalite-")
    if name not in COMMANDS:
        name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        sys.stderr.write(f"error: {name or 'no command'}: give one of {', '.join(COMMANDS)}\n")
        sys.exit(2)
    script = script_of(name)
    sys.path.insert(0, str(script.parent))  # as Python does for a script
    runpy.run_path(str(script), run_name="__main__")


def script_of(name: str) -> Path:
    """What a command runs: inside the package where it is installed, beside it in a clone."""
    here = Path(__file__).resolve().parent
    packed = here / "scripts"
    return (packed if packed.is_dir() else here.parent) / COMMANDS[name]


def typed(name: str) -> str:
    """What a user types to run a command: `megalite-report`, or in a clone `python tools/report.py`."""
    return f"megalite-{name}" if script_of(name).parent.name == "scripts" else f"python {COMMANDS[name]}"


if __name__ == "__main__":
    main()
