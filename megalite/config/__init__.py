"""Configuration: one schema for flags, YAML files and the saved `config.yaml` (floor 2, no torch).

Picture::

    defaults < family defaults < --config a.yaml < --config b.yaml < flags      (every value knows where it came from)
                                    |
                         parse(argv) -> Config(model, parallel, training, optimizer, data, checkpoint, logging)

Rooms: one file a section (`model` and its `model_parts`, `parallel`, `training`, `optimizer`, `data`, `checkpoint`,
`logging`), made of `schema.option`; `root` puts them together; `reader`, `yaml_file`, `names`, `megatron_flags` and
`values` read what users type, `cli` merges it, `worked_out` turns names that are no field into fields; `legal` judges
it by `rules/`, `files` looks whether files exist; `saved` writes and reads it back; `batch_size` has what changes with
the tokens consumed: batch size, sequence length; `sampling` is how generation chooses.

Names are Megatron-LM's flag names with underscores; a field that several flags spell is a small dataclass of them
(`schema.Spelled`, `OneOf`). Sections are frozen; a changed copy is made with `dataclasses.replace`. Derived numbers are
properties, so they cannot go stale.

A new flag: one field with its help and bounds; a rule if it is tied to others; a row in `test_flags_take_effect.py`;
`python tools/make_flag_table.py`.

Invariant: nothing is accepted and ignored but flags that only tune Megatron-LM, which a run names;
every problem is reported in one pass, one line each.
Proof: `tests/unit/config/test_bad_input.py` (exact lines), `tests/unit/train/test_flags_take_effect.py`.
"""

from megalite.config.architecture import Offer, architecture_differences, effective, new_positions
from megalite.config.arguments import places, shown_flag
from megalite.config.batch_size import BatchSizeSchedule, LengthSchedule
from megalite.config.checkpoint import CheckpointConfig
from megalite.config.cli import Parsed, ignored_line, parse, parse_with_origins, read_unjudged, without_effect
from megalite.config.data import (
    TOKENIZER_ALIASES,
    TOKENIZERS,
    TOKENIZERS_ELSEWHERE,
    USUAL_VOCABULARIES,
    VOCABULARIES,
    DataConfig,
)
from megalite.config.files import (
    as_it_is_there,
    ids_of_files,
    meant_for_this_host,
    missing_data,
    missing_packages,
    missing_tokenizer,
    missing_trackers,
    schedule_file,
)
from megalite.config.layer_pattern import pattern_text
from megalite.config.legal import config_problems, config_warnings, layout_problems
from megalite.config.logging import LoggingConfig
from megalite.config.megatron_flags import MegatronFlag, megatron_flags
from megalite.config.model import OWN_PATTERNS, ModelConfig
from megalite.config.model_parts import Delta, Experts, FurtherTokens, Latent, QKClip, RopeScaling
from megalite.config.mup import Rates, depth_ratio, hidden_std, rates_of, residual_std, width_ratio
from megalite.config.optimizer import Decay, HostOffload, OptimizerArgs, OptimizerConfig, Warmup, readers_of
from megalite.config.parallel import (
    ContextParallelism,
    DeviceOptions,
    GridShape,
    ParallelConfig,
    StageLayout,
    ZeroPlusPlus,
)
from megalite.config.root import SECTIONS, Config, all_options, with_vocab_size
from megalite.config.rules.beside import cache_problem
from megalite.config.rules.shape import model_shape
from megalite.config.rules.text import divisors
from megalite.config.sampling import Sampling
from megalite.config.saved import dump_yaml, from_dict, to_dict
from megalite.config.schema import Option, build_section, flat, options_of
from megalite.config.stage_meshes import StageMesh, parse_meshes, stage_sizes
from megalite.config.staleness import Correction, StalenessCorrection, completed, has_delay
from megalite.config.training import BatchRamp, Float8, LossScaling, Precision, Spikes, TrainingConfig, TrainingLength
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.config.usage import accepted_spellings, listing
from megalite.config.values import bounds_problem, show
