"""The training run: from a configuration to its last checkpoint.

::

    Config -- run.py:open_run --> build.py: model, optimizer, program;  run_data.py: data --> Trainer.train()
                                                                                          |  StepStats, records
                                                                                          v
                                                            megalite.observe: console, metrics.jsonl, trackers, profiler

Invariants: no layout changes what is computed (`tests/equivalence`); a run that is stopped anywhere continues with the
same bits (`tests/faults`).
"""

from megalite.train.build import build_model, parameter_dtype, wide_dtype, zero_options
from megalite.train.dry_run import dry_run
from megalite.train.make_mesh import make_mesh, mesh_on_meta
from megalite.train.matmul_precision import MODES
from megalite.train.planned import PlannedRun
from megalite.train.programs import ProgramCache
from megalite.train.resume_report import changes
from megalite.train.run import OpenRun, open_run, run_training
from megalite.train.run_data import open_datasets, resolve_tokenizer
from megalite.train.run_state import RunState
from megalite.train.samples import ModelInUse
from megalite.train.starting_point import config_of, load_model, load_weights, offer_of
from megalite.train.trainer import quiet_collector
