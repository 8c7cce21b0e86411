"""Defaults, files and flags: which one wins, where a value came from, and what aliases stand for."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from config_arguments import BASE, argv

from megalite.config import Config, dump_yaml, from_dict, parse, parse_with_origins, to_dict, with_vocab_size
from megalite.config.arguments import places
from megalite.config.root import all_options
from megalite.errors import ConfigError, flag_of
from megalite.schedule import expand_layout


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_flags_beat_later_files_beat_earlier_files_beat_defaults(tmp_path: Path) -> None:
    one = write(tmp_path / "one.yaml", "seed: 1\nmin_lr: 1e-5\nlog_interval: 3\n")
    two = write(tmp_path / "two.yaml", "training:\n  seed: 2\noptimizer:\n  min_lr: 2e-5\n")
    parsed = parse_with_origins([*argv("--min-lr 3e-5"), "--config", one, "--config", two])
    config, origins = parsed.config, parsed.origins
    assert (config.logging.log_interval, origins["log_interval"]) == (3, f"{one}:3")
    assert (config.training.seed, origins["seed"]) == (2, f"{two}:2")
    assert (config.optimizer.min_lr, origins["min_lr"]) == (3e-5, "command line")
    assert (config.optimizer.args.adam_beta1, origins["adam_beta1"]) == (0.9, "default")
    assert origins["global_batch_size"] == "derived"
    assert list(origins) == list(all_options())


def test_flat_and_nested_yaml_mean_the_same(tmp_path: Path) -> None:
    flat = write(tmp_path / "flat.yaml", "".join(f"{name}: {value}\n" for name, value in BASE.items()))
    nested = write(
        tmp_path / "nested.yaml",
        "model: {num-layers: 8, hidden_size: 96, num_attention_heads: 8, seq_length: 64, vocab_size: 100}\n"
        "training: {micro_batch_size: 1, train_iters: 100}\noptimizer: {lr: 1e-3, optimizer: adam}\n",
    )
    expected = parse(argv())
    assert parse(["--config", flat, "--mock-data"]) == expected
    assert parse(["--mock_data", f"--config={nested}"]) == expected


def test_yaml_numbers_are_read_by_the_type_of_the_field(tmp_path: Path) -> None:
    # YAML 1.1 takes 1e-4 for a string, 0:8 for a sexagesimal number and `no` for a boolean.
    text = "min_lr: 1e-4\ntrain_samples: 1e6\nstep_batch_size_schedule: 0:8\nwandb_project: no\ndata_path: [a, b]\n"
    flags = argv(without="train-iters mock-data")
    config = parse([*flags, "--config", write(tmp_path / "a.yaml", text)], check_files=False)
    assert config.optimizer.min_lr == 1e-4
    assert config.training.length.train_samples == 1_000_000
    assert config.training.batch_ramp.step_batch_size_schedule == "0:8"
    assert config.logging.wandb.wandb_project == "no"
    assert config.data.data_path == ("a", "b")


def test_switches_and_their_no_forms(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "bf16: true\ndisable_bias_linear: true\nno_load_optim: true\nload: .\n")
    config = parse([*argv(), "--config", file])
    precision, model, checkpoint = config.training.precision, config.model, config.checkpoint
    assert (precision.bf16, model.add_bias_linear, checkpoint.load_optim) == (True, False, False)
    config = parse([*argv("--no-bf16 --add-bias-linear --load-optim"), "--config", file])
    precision, model, checkpoint = config.training.precision, config.model, config.checkpoint
    assert (precision.bf16, model.add_bias_linear, checkpoint.load_optim) == (False, True, True)
    assert parse(argv("--bf16 --no-bf16 --bf16")).training.precision.bf16, "the last of one name counts"


ALIASES = [
    ("--use-distributed-optimizer", "parallel", {"zero_stage": 1}),
    ("--no-use-distributed-optimizer", "parallel", {"zero_stage": 0}),
    ("--disable-bias-linear", "model", {"add_bias_linear": False}),
    ("--swiglu", "model", {"activation": "swiglu"}),
    ("--squared-relu", "model", {"activation": "squared-relu"}),
    ("--recompute-activations", "model", {"recompute_granularity": "selective"}),
    ("--use-rotary-position-embeddings", "model", {"position_embedding_type": "rope"}),
    ("--group-query-attention", "model", {"num_query_groups": 1}),
    ("--group-query-attention --num-query-groups 4", "model", {"num_query_groups": 4}),
    ("--num-query-groups 4", "model", {"num_query_groups": 4}),
    ("--normalization rmsnorm", "model", {"normalization": "RMSNorm"}),
    ("--optimizer AdamW", "optimizer", {"optimizer": "adam"}),
    ("--pipeline-schedule dapple", "parallel", {"pipeline_schedule": "1f1b"}),
    ("--pipeline-schedule PipeDream-Flush", "parallel", {"pipeline_schedule": "1f1b"}),
    ("--no-load-optim --load .", "checkpoint", {"load_optim": False}),
    ("--model-type llama", "model", {"activation": "swiglu", "normalization": "RMSNorm", "add_bias_linear": False}),
    ("--model-type llama --normalization LayerNorm", "model", {"normalization": "LayerNorm", "activation": "swiglu"}),
]


@pytest.mark.parametrize(("changes", "section", "expected"), ALIASES, ids=[row[0] for row in ALIASES])
def test_aliases(changes: str, section: str, expected: dict[str, object]) -> None:
    values = getattr(parse(argv(changes)), section)
    assert {name: getattr(values, name) for name in expected} == expected


@pytest.mark.parametrize(
    "spelling",
    [
        "--virtual-pipeline-model-parallel-size 2",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--num-layers-per-virtual-pipeline-stage 2",
    ],
)
def test_three_spellings_of_chunks_per_rank(spelling: str) -> None:
    config = parse(argv(f"--pipeline-model-parallel-size 2 --global-batch-size 4 {spelling}"), world_size=2)
    assert config.parallel.virtual_pipeline_model_parallel_size == 2
    assert config.parallel.schedule == "interleaved"


def test_layers_per_chunk_are_as_many_as_asked_for() -> None:
    """As in Megatron-LM, however heavy the head is; chunks per rank are balanced with it."""
    asked = "--num-layers 12 --vocab-size 65536 --pipeline-model-parallel-size 2 --global-batch-size 4"
    config = parse(argv(f"{asked} --num-layers-per-virtual-pipeline-stage 2"), world_size=2)
    assert expand_layout(str(config.parallel.stage_layout.pipeline_model_parallel_layout)) == "Ett|tt|tt|tt|tt|ttL"
    assert config.parallel.virtual_pipeline_model_parallel_size == 3
    config = parse(
        argv(f"{asked} --num-layers-per-virtual-pipeline-stage 2 --decoder-last-pipeline-num-layers 2"), world_size=2
    )
    assert config.parallel.stage_layout.pipeline_model_parallel_layout is None


def test_a_flag_replaces_another_spelling_in_a_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml",
        "pipeline_model_parallel_size: 2\nnum_layers_per_virtual_pipeline_stage: 2\n"
        "global_batch_size: 4\nswiglu: true\n",
    )
    flags = argv("--virtual-pipeline-model-parallel-size 4 --activation geglu")
    config = parse([*flags, "--config", file], world_size=2)
    assert config.parallel.num_chunks == 4
    assert config.model.activation == "geglu"


def test_negative_and_attached_values() -> None:
    # argparse would take -1e-4 for a flag.
    with pytest.raises(ConfigError, match=r"^--lr=-0.0001: must be > 0; 3e-4 is common$"):
        parse(argv("--lr -1e-4"))
    assert parse(argv("--lr=5e-4 --data_path=a b --no-mock-data", "mock-data"), check_files=False).data.data_path == (
        "a",
        "b",
    )


def test_tuples_of_numbers_take_spaces_and_commas() -> None:
    config = parse(argv("--iterations-to-skip 3 5,7 --global-batch-size 8 --rampup-batch-size 4 2 100"))
    assert config.training.iterations_to_skip == (3, 5, 7)
    assert config.training.batch_ramp.rampup_batch_size == (4, 2, 100)


@pytest.mark.parametrize(
    "changes",
    [
        "",
        "--model-type llama --num-query-groups 2 --iterations-to-skip 1 2",
        "--global-batch-size 8 --rampup-batch-size 4 2 100 --adam-eps 1e-12 --save ./odd:name",
        "--split 90,5,5 --tokenizer-type ByteTokenizer --bf16",
    ],
)
def test_a_saved_configuration_reads_back_equal(changes: str, tmp_path: Path) -> None:
    parsed = parse_with_origins(argv(changes))
    for origins in (None, parsed.origins):
        path = tmp_path / "config.yaml"
        path.write_text(dump_yaml(parsed.config, origins))
        assert parse(["--config", str(path)]) == parsed.config
    assert from_dict(to_dict(parsed.config)) == parsed.config


def test_dry_run_is_not_saved(tmp_path: Path) -> None:
    config = parse(argv("--dry-run"))
    assert config.training.dry_run
    assert "dry_run" not in dump_yaml(config)


@pytest.mark.parametrize(
    ("section", "name", "value", "line"),
    [
        ("model", "num_layers", "8", "m: model.num_layers='8': expected int"),
        ("model", "num_layers", True, "m: model.num_layers=True: expected int"),
        ("model", "num_layers", 0, "m: model.num_layers=0: must be >= 1 and <= 10000; try 1"),
        ("model", "depth", 3, "m: unknown key 'model.depth'"),
        ("optimizer", "lr", None, "m: optimizer.lr=None: expected a value"),
        ("data", "data_path", "a", "m: data.data_path='a': expected a list"),
    ],
)
def test_a_damaged_dictionary_is_refused(section: str, name: str, value: object, line: str) -> None:
    data = to_dict(parse(argv()))
    data[section][name] = value
    with pytest.raises(ConfigError) as caught:
        from_dict(data, "m")
    assert caught.value.problems == [line]


def test_sections_are_frozen_and_copies_derive_anew() -> None:
    config = parse(argv())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.num_layers = 3  # type: ignore[misc]
    wider = dataclasses.replace(config.model, hidden_size=192)
    assert (config.model.ffn_size, wider.ffn_size, wider.head_dim) == (384, 768, 24)
    assert with_vocab_size(config, 50257).padded_vocab_size() == 50304


def test_every_field_has_help_and_an_unambiguous_name() -> None:
    options = all_options()
    assert len(options) <= 321  # spellings; the fields are bounded by section in tests/test_architecture.py
    for option in options.values():
        assert option.help and not option.help.endswith("."), option.name
        assert option.name == option.name.lower()
        # Megatron-LM's --no-rope-freq: there is no flag that it could switch off
        switches_off = option.name.startswith("no_") and option.name.removeprefix("no_") in options
        assert option.name == "no_rope_freq" or not option.name.startswith("no_"), f"{option.flag}: --no- switches off"
        assert not switches_off, option.flag


def test_no_flag_is_a_proper_prefix_of_one_of_torchrun() -> None:
    # torchrun's parser also looks at what stands after the script, and abbreviates.
    torchrun = (
        "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone max-restarts monitor-interval "
        "start-method event-log-handler role module no-python run-path log-dir redirects tee local-ranks-filter "
        "duplicate-stdout-filters duplicate-stderr-filters node-rank master-addr master-port local-addr logs-specs "
        "numa-binding signals-to-handle virtual-local-rank shutdown-timeout"
    ).split()
    names = [name.replace("_", "-") for name in all_options()]
    names += [f"no-{name}" for name in names] + ["config", "help"]
    for name in names:
        for other in torchrun:
            assert name == other or not other.startswith(name), f"torchrun would read --{name} as --{other}"


def test_configuration_needs_no_torch() -> None:
    code = "import sys, megalite.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_prints_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for name, option in all_options().items():
        flag, argument = places().get(name, (name, ""))
        assert f"  {flag_of(flag)} " in f"{printed} ".replace("\n", " \n")
        assert not argument or f" {argument}" in printed.partition(f"  {flag_of(flag)} ")[2], option


def test_config_is_hashable_and_comparable() -> None:
    first, second = parse(argv()), parse(argv())
    assert isinstance(first, Config) and first == second and hash(first) == hash(second)
