"""Fields that several flags spell: which spelling holds, what is said where two meet, and what is written down."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import argv

from megalite.config import Config, dump_yaml, from_dict, parse, parse_with_origins, read_unjudged, to_dict
from megalite.config.arguments import argument_flags
from megalite.config.root import SECTIONS, all_options
from megalite.config.schema import build_section, flat
from megalite.config.values import as_typed
from megalite.errors import ConfigError

REQUIRED = [name for name, each in all_options().items() if each.facts.get("required")]
# Spellings of one field that exclude each other, each with a value; what both need beside the base.
RIVALS = [
    ("--train-samples 24", "--train-tokens 640", ""),
    ("--train-iters 7", "--train-samples 24", ""),
    ("--train-iters 7", "--train-tokens 640", ""),
    ("--lr-decay-iters 7", "--lr-decay-samples 24", ""),
    ("--lr-warmup-iters 3", "--lr-warmup-samples 5", ""),
    ("--lr-warmup-iters 3", "--lr-warmup-fraction 0.5", ""),
    ("--lr-warmup-samples 5", "--lr-warmup-fraction 0.5", ""),
    ("--lr-wsd-decay-iters 7", "--lr-wsd-decay-samples 24", "--lr-decay-style WSD"),
    ("--rampup-batch-size 1 1 100", "--step-batch-size-schedule 0:8", ""),
    (
        "--decoder-first-pipeline-num-layers 3",
        "--pipeline-model-parallel-layout Ettt|tttttL",
        "--pipeline-model-parallel-size 2 --nprocs 2 --global-batch-size 2",
    ),
    (
        "--decoder-last-pipeline-num-layers 3",
        "--pipeline-model-parallel-layout Ettt|tttttL",
        "--pipeline-model-parallel-size 2 --nprocs 2 --global-batch-size 2",
    ),
    (
        "--override-opt-param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
        "--load . --no-skip-train --train-iters 5",
    ),
    ("--bf16", "--fp16", ""),
    ("--bf16", "--fp64", ""),
    ("--fp16", "--fp64", ""),
]
# Ways to name the data, each with what may stand beside it.
SOURCES = {
    "--data-path a": (),
    "--train-data-path b": ("--valid-data-path c", "--test-data-path d"),
    "--valid-data-path c": ("--train-data-path b", "--test-data-path d", "--data-schedule 0:f"),
    "--test-data-path d": ("--train-data-path b", "--valid-data-path c", "--data-schedule 0:f"),
    "--data-schedule 0:f": ("--valid-data-path c", "--test-data-path d"),
    "--data-args-path e": (),
    "--mock-data": (),
}
IDS = [f"{one.split()[0]} {other.split()[0]}" for one, other, _ in RIVALS]


def flags(*more: str) -> list[str]:
    """Legal flags that leave the length of the training open."""
    return [*argv(without="train-iters"), "--skip-train", *(word for text in more for word in text.split())]


def name_of(spelling: str) -> str:
    return spelling.split()[0].removeprefix("--").replace("-", "_")


def by_flag(config: Config) -> dict[str, dict[str, object]]:
    return {section: flat(getattr(config, section)) for section in SECTIONS}


def yaml_line(name: str, value: object) -> str:
    text = "null" if value is None else [*value] if isinstance(value, tuple) else str(value)
    return f"{name}: {str(text).lower() if isinstance(value, bool) else text}\n"


@pytest.mark.parametrize(("one", "other", "shared"), RIVALS, ids=IDS)
def test_two_spellings_of_one_field_are_a_contradiction(one: str, other: str, shared: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(flags(shared, one, other))
    first, second = ("=".join(spelling.split(maxsplit=1)) for spelling in (one, other))
    assert caught.value.problems == [f"{second}: contradicts {first}; give one of them"]


@pytest.mark.parametrize(("one", "other", "shared"), RIVALS, ids=IDS)
def test_a_flag_takes_the_place_of_another_spelling_in_a_file(
    one: str, other: str, shared: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    for below, above in ((one, other), (other, one)):
        file.write_text(yaml_line(name_of(below), " ".join(below.split()[1:]) or True))
        parsed = parse_with_origins(["--config", str(file), *flags(shared, above)])
        assert parsed.config == parse(flags(shared, above))
        assert parsed.origins[name_of(above)] == "command line"
        assert parsed.origins[name_of(below)] == "default"
        if not all_options()[name_of(above)].facts.get("saved", True):
            continue
        written = dump_yaml(parsed.config, parsed.origins)
        assert f"  {name_of(below)}:" not in written and f"  {name_of(above)}:" in written
        file.write_text(written)
        assert parse(["--config", str(file)]) == parsed.config == from_dict(to_dict(parsed.config))


@pytest.mark.parametrize("below", SOURCES)
def test_a_later_source_of_data_takes_the_place_of_another(below: str, tmp_path: Path) -> None:
    """Two of one level contradict each other, but for those of single splits."""
    file, base = tmp_path / "a.yaml", argv("--tokenizer-type ByteTokenizer --vocab-size 257", without="mock-data")
    file.write_text(yaml_line(name_of(below), " ".join(below.split()[1:]) or True))
    for above in SOURCES.keys() - {below}:
        data = parse(["--config", str(file), *base, *above.split()], check_files=False).data
        both = [*below.split(), *above.split()]
        if above in SOURCES[below]:
            assert data == parse([*base, *both], check_files=False).data
            continue
        assert data == parse([*base, *above.split()], check_files=False).data
        with pytest.raises(ConfigError, match=r"contradicts .*; give one of them"):
            parse([*base, *both], check_files=False)


def test_a_spelling_taken_back_in_a_later_file_leaves_the_others_alone(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train_samples: 24\n")
    (tmp_path / "b.yaml").write_text("train_iters: null\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    assert parse([*files, *flags()]).training.length.train_samples == 24


@pytest.mark.parametrize("spelling", sorted({spelling for one, other, _ in RIVALS for spelling in (one, other)}))
def test_what_older_runs_have_written_reads_as_it_was_meant(spelling: str, tmp_path: Path) -> None:
    """Every flag stood in it, those that were not given with their defaults."""
    shared = next(shared for *pair, shared in RIVALS if spelling in pair)
    config = parse(flags(shared, spelling))
    whole = by_flag(config)
    assert from_dict(whole) == config
    file = tmp_path / "config.yaml"
    with file.open("w") as stream:
        for section, values in whole.items():
            stream.write(f"{section}:\n" + "".join("  " + yaml_line(*pair) for pair in values.items()))
    assert parse(["--config", str(file)]) == config
    assert {name for values in whole.values() for name in values} == set(all_options())


def test_numbers_of_an_optimizer_by_name(tmp_path: Path) -> None:
    by_name = parse(
        flags("--optimizer muon --optimizer-args muon_momentum=0.9 adam-eps=1e-6 muon_scale_mode=unit_rms_norm")
    )
    assert by_name == parse(
        flags("--optimizer muon --muon-momentum 0.9 --adam-eps 1e-6 --muon-scale-mode unit_rms_norm")
    )
    (tmp_path / "a.yaml").write_text(
        "optimizer:\n  optimizer: adafactor\n  optimizer_args: [adafactor_scale_parameter=true]\n"
    )
    parsed = parse_with_origins(["--config", str(tmp_path / "a.yaml"), *flags()])
    assert parsed.config.optimizer.args.adafactor_scale_parameter
    assert parsed.origins["adafactor_scale_parameter"] == f"{tmp_path / 'a.yaml'}:3"
    written = dump_yaml(parsed.config)
    assert "adafactor_scale_parameter: true" in written and "lion_beta1" not in written
    later = ["--config", str(tmp_path / "a.yaml"), *flags("--no-adafactor-scale-parameter")]
    assert not parse(later).optimizer.args.adafactor_scale_parameter


# A flag with arguments, and what the same settings are by names of their own.
ARGUMENTS = [
    ("--rope-scaling type=yarn,factor=4", "--use-rope-scaling --rope-scaling-type yarn --rope-scaling-factor 4"),
    ("--rope-scaling", "--use-rope-scaling"),
    ("--rope-scaling original_length=64 --no-rope-scaling", "--rope-scaling-original-length 64"),
    (
        "--skip-freq window=1,0,1 rope=2 --window-size 8",
        "--window-attn-skip-freq 1,0,1 --no-rope-freq 2 --window-size 8",
    ),
    (
        "--lora rank=4 targets=linear_qkv,linear_fc1 alpha=8",
        "--lora-rank 4 --lora-targets linear_qkv linear_fc1 --lora-alpha 8",
    ),
    ("--lora rank=4 --lora alpha=8 --lora rank=5", "--lora-rank 5 --lora-alpha 8"),
    ("--profile ranks=0,2 step-start=1", "--profile --profile-ranks 0 2 --profile-step-start 1"),
    ("--profile", "--profile --profile-step-start 10"),
    (
        "--offload optimizer,params,embedding,activations=1",
        "--optimizer-cpu-offload --param-offload cpu --embedding-offload cpu --cpu-offloading-num-layers 1",
    ),
    (
        "--offload optimizer=false params=none path=/tmp/a,b",
        "--no-optimizer-cpu-offload --param-offload none --optimizer-offload-path /tmp/a,b",
    ),
    ("--wandb project=a entity=b", "--wandb-project a --wandb-entity b"),
    ("--fp8 format=e4m3", "--fp8-format e4m3"),
]


@pytest.mark.parametrize(("arguments", "names"), ARGUMENTS, ids=[row[0] for row in ARGUMENTS])
def test_arguments_of_a_flag_set_the_fields_that_names_of_their_own_set(
    arguments: str, names: str, tmp_path: Path
) -> None:
    by_name = read_unjudged(flags(names))[0]
    assert read_unjudged(flags(arguments))[0] == by_name
    (tmp_path / "config.yaml").write_text(dump_yaml(by_name))
    assert read_unjudged(["--config", str(tmp_path / "config.yaml")])[0] == by_name


def test_every_argument_is_read(tmp_path: Path) -> None:
    """By the flag and in a file, as the field's own name is; a wrong one has a line that says which there are."""
    options, file = all_options(), tmp_path / "a.yaml"
    for flag, made in argument_flags().items():
        for argument, name in made.fields.items():
            option = options[name]
            value = "true" if option.kind is bool else (option.choices or ("3",))[-1]
            value = "0.5" if option.facts.get("le") == 1 or option.facts.get("lt") == 1 else value
            expected = read_unjudged(flags(f"--{name}={value}"))[0]
            if made.switch is not None:
                expected = read_unjudged(flags(f"--{made.switch} --{name}={value}"))[0]
            file.write_text(f"{flag}: {{{argument}: {value}}}\n")
            nested = tmp_path / "b.yaml"
            nested.write_text(f"{option.section}:\n  {flag}: [{argument}={value}]\n")
            if name in ("cpu_offloading_num_layers", "moe_token_dispatcher_type"):  # of another section than the rest
                nested.write_text(f"{flag}: {argument}={value}\n")
            for words in ([f"--{flag}", f"{argument}={value}"], ["--config", str(file)], ["--config", str(nested)]):
                assert read_unjudged([*words, *flags()])[0] == expected, words
        with pytest.raises(
            ConfigError, match=f"--{flag.replace('_', '-')}=none_such=1: no argument none_such: names are"
        ):
            parse(flags(f"--{flag} none_such=1"))
        file.write_text(f"{flag}:\n  none_such: 1\n")
        with pytest.raises(ConfigError, match=f"a.yaml:2: unknown key 'none_such' of '{flag}'; names are "):
            parse(["--config", str(file), *flags()])


LORA = "names are rank, kind, alpha, targets, shared_a, int8"
AS_GIVEN = [
    ("--lora rank=0", "--lora rank=0: must be >= 1; try 1"),
    (
        "--offload optimizer --optimizer-state param_remainders --bf16",
        "--optimizer-state param_remainders: excludes --offload optimizer; give one of them",
    ),
    (
        "--optimizer lion --optimizer-args lion_beta1=2",
        "--optimizer-args lion_beta1=2: must be >= 0 and < 1; try 0.95",
    ),
    ("--optimizer-args adam_eps=tiny", "--optimizer-args=adam_eps=tiny: not a number"),
    (
        "--optimizer-args beta1=0.9",
        "--optimizer-args=beta1=0.9: no argument beta1: names are adam_beta1, adam_beta2, adam_eps, sgd_momentum, "
        "lion_beta1, lion_beta2, muon_momentum, muon_scale_mode, muon_extra_scale_factor, soap_beta1, "
        "soap_beta2, soap_eps, soap_precondition_frequency, soap_max_precond_dim, shampoo_beta1, shampoo_beta2, "
        "shampoo_eps, shampoo_matrix_eps, shampoo_precondition_frequency, shampoo_max_precond_dim, "
        "kfac_momentum, kfac_decay, kfac_damping, kfac_kl_clip, kfac_scale, kfac_inverse_frequency, kfac_factors, "
        "adafactor_scale_parameter, impl; did you mean adam_beta1=0.9?",
    ),
    ("--lora r=8 alpha=16", f"--lora=r=8: no argument r: {LORA}; did you mean rank=8?"),
    ("--lora lora_rank=8", f"--lora=lora_rank=8: no argument lora_rank: {LORA}; did you mean rank=8?"),
    ("--lora rank=8 lora_alpha=16", f"--lora=lora_alpha=16: no argument lora_alpha: {LORA}; did you mean alpha=16?"),
    (
        "--lora rank=8 target_modules=q_proj",
        f"--lora=target_modules=q_proj: no argument target_modules: {LORA}; did you mean targets=q_proj?",
    ),
    ("--lora rank=8 dropout=0.1", f"--lora=dropout=0.1: no argument dropout: {LORA}"),
    ("--lora 8", f"--lora=8: expected NAME=VALUE, {LORA}"),
    ("--lora rank", "--lora=rank: expected rank=VALUE"),
    ("--lora", "--lora: expected NAME=VALUE ...; names are rank, kind, alpha, targets, shared_a, int8"),
    (
        "--wandb name=x",
        "--wandb=name=x: no argument name: names are project, exp_name, entity, save_dir; did you mean exp_name=x?",
    ),
    (
        "--optimizer-args adam_eps=1e-6 --adam-eps 1e-7",
        "--adam-eps=1e-07: contradicts --optimizer-args adam_eps=1e-6; give one of them",
    ),
    (
        "--pipeline-schedule pipedream --use-distributed-optimizer --clip-grad 0",
        "--use-distributed-optimizer: not with --pipeline-schedule=pipedream: every stage steps after every "
        "micro-batch, so nothing can be sharded between steps; legal: 0",
    ),
]


@pytest.mark.parametrize(("changes", "line"), AS_GIVEN, ids=[row[0] for row in AS_GIVEN])
def test_a_line_names_the_spelling_that_was_given(changes: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(flags(changes))
    assert caught.value.problems == [line]


def test_every_spelling_with_rivals_is_tried_here() -> None:
    options = all_options().values()
    tried = {name_of(spelling) for one, other, _ in RIVALS for spelling in (one, other)}
    tried |= set(map(name_of, SOURCES))
    assert not [each.flag for each in options if any(map(each.excludes, options)) and each.name not in tried]


def test_sections_are_taken_apart_and_put_together() -> None:
    config = parse(argv())
    for section, cls in SECTIONS.items():
        values = getattr(config, section)
        assert build_section(cls, flat(values)) == values
    assert (as_typed("--bf16", True), as_typed("--lr", 0.5)) == ("--bf16", "--lr=0.5")


@pytest.mark.parametrize(
    ("text", "tokens"), [("15T", 15 * 10**12), ("1.5b", 1_500_000_000), ("300G", 3 * 10**11), ("2e9", 2 * 10**9)]
)
def test_a_number_of_tokens_may_end_in_a_unit(text: str, tokens: int, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"training: {{train_tokens: {text}}}\n")
    for given in (f"--train-tokens {text}", f"--config {tmp_path / 'a.yaml'}"):
        config, _ = read_unjudged(given.split(), optional=REQUIRED)
        assert config.training.length.train_tokens == tokens


@pytest.mark.parametrize("text", ["15Q", "T", "TT", "1TT", "0.5", "1.23456K", "nanT", "infK", "1e99T"])
def test_what_is_no_number_of_tokens_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--train-tokens={text}: not an integer, nor one that ends in K, M, G, B or"):
        read_unjudged(f"--train-tokens {text}".split(), optional=REQUIRED)
    with pytest.raises(ConfigError, match="--seed=1K: not an integer$"):
        read_unjudged("--seed 1K".split(), optional=REQUIRED)
