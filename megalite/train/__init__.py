"""The training run: from a configuration to its last checkpoint.

::

    Config -- run.py:open_run --> build.py: model, optimizer, program;  run_data.py: data --> Trainer.train()
                                                                                          |  StepStats, records
                                                                                          v
                                                            megalite.observe: console, metrics.jsonl, trackers, profiler

    run             the composition root: `open_run` is the one place that knows all rooms
    build           the model, its pipeline and its optimizer on this rank
    trainer         the loop: decide, step, report
    batch_reader    micro-batches by number and the factors of their losses
    run_data, validation    the run's data; evaluation through the same pipeline
    starting_point, run_state, run_directory    what a run begins with; what its checkpoints hold; its directory, and
                    starts in vain
    announcement    the table at the start, advice, predicted memory against what hosts and GPUs have free
    planned         a run before anything large is made; the memory of a user's module
    param_schedules, matmul_precision   learning rate and weight decay over a run; how fp32 products are computed, and
                    what else last bits depend on
    programs        the pipeline programs of a run, each validated once
    foreign         `--model-module`: a user's module, whether it reads later tokens
    host_embedding  `--offload embedding`
    further         inputs and labels of multi-token prediction
    spikes, rollback    spikes of the gradient, samples passed over, the way back to a checkpoint
    shared_disks    hosts that see other folders
    expert_report, samples      routers as numbers of a log line; continuations of prompts during a run
    dry_run, resume_report  `--dry-run`; what a resumed run says of its checkpoint
    exits           when to stop: interval, duration, signal, agreed by all ranks

Invariants: no layout changes what is computed (`tests/equivalence`); a run that is stopped anywhere continues with the
same bits (`tests/faults`).
"""

from megalite.train.build import build_model, parameter_dtype, wide_dtype, zero_options
from megalite.train.dry_run import dry_run
from megalite.train.matmul_precision import MODES
from megalite.train.planned import PlannedRun
from megalite.train.programs import ProgramCache
from megalite.train.resume_report import changes
from megalite.train.run import OpenRun, make_mesh, open_run, run_training
from megalite.train.run_data import open_datasets, resolve_tokenizer
from megalite.train.run_state import RunState
from megalite.train.samples import ModelInUse
from megalite.train.starting_point import config_of, load_model, load_weights, offer_of
from megalite.train.trainer import quiet_collector
