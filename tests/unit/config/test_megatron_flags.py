"""Every flag of Megatron-LM is read, ignored or refused with a reason; NVIDIA's scripts parse but for these."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arguments import argv
from megatron_scripts import SCRIPTS

from command_line import name_ignored
from megalite.config import all_options, megatron_flags, parse, parse_with_origins, shown_flag, without_effect
from megalite.config.megatron_flags import MegatronFlag
from megalite.config.reader import Reader
from megalite.errors import SETTING, ConfigError, flag_of, spelled
from megalite.train.starting_point import offer_of

FLAGS = megatron_flags()
WORLD = {"gpt3 175b": 128, "mixtral 8x7b": 32, "deepseek v3 fsdp": 256}
# Flags of each script that are refused because the feature is not here; other lines, whole.
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    # Megatron-LM's own check refuses this one too.
    "gpt3 175b": ("", ("--global-batch-size=1536: excludes --step-batch-size-schedule; give one of them",)),
    "llama3 8b fp8": ("", ()),
    "llama3 8b fsdp": ("", ()),
    "mixtral 8x7b": ("", ()),
    "deepseek v3 fsdp": (
        "--moe-router-force-load-balancing --megatron-fsdp-grad-comm-dtype --megatron-fsdp-main-grads-dtype "
        "--moe-flex-dispatcher-backend",
        (),
    ),
    "gpt-oss": (
        "--disable-bf16-reduced-precision-matmul",
        (),
    ),
    "sc21 figures": ("--activations-checkpoint-method", ()),
    "detoxify gpt 1.3b": ("--data-path2 --checkpoint-activations", ()),
}


def problems_of(words: list[str], world: int = 8) -> list[str]:
    try:
        parse(words, world_size=world, check_files=False)
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_nvidia_parses_or_each_flag_gets_its_reason(script: str) -> None:
    features, others = REFUSED[script]
    problems = problems_of(SCRIPTS[script].split(), WORLD.get(script, 8))
    refused = {line.partition(":")[0].partition("=")[0] for line in problems if line not in others}
    assert refused == set(features.split()) and set(others) <= set(problems), "\n".join(problems)
    for line in problems:
        flag = FLAGS.get(line.partition(":")[0].partition("=")[0][2:].replace("-", "_"))
        if flag is not None and flag.verdict != "same":
            assert line.endswith(spelled(flag.otherwise or flag.reason, shown_flag))


def test_the_llama_script_is_the_run_that_it_asks_for() -> None:
    parsed = parse_with_origins(SCRIPTS["llama3 8b fsdp"].split(), world_size=8, check_files=False)
    assert parsed.config.data.split == "99,1,0" and parsed.config.optimizer.decoupled_min_lr == 4.5e-5
    assert parsed.config.parallel.zero_stage == 3 and parsed.config.model.activation == "swiglu"
    assert parsed.ignored[:3] == ("--use-mcore-models", "--attention-backend", "--cross-entropy-loss-fusion")
    assert "--manual-gc" in parsed.ignored and "--overlap-grad-reduce" not in parsed.ignored


def test_the_table_agrees_with_the_parser() -> None:
    options = all_options()
    known = Reader().known
    for flag in FLAGS.values():
        assert (flag.name in known) == (flag.verdict == "same"), flag.name
        assert bool(flag.reason) == (flag.verdict != "same"), flag.name
        assert bool(flag.otherwise) == bool(flag.values), flag.name
        for other in SETTING.findall(flag.reason + flag.otherwise):
            assert other in options or other == "config", flag.reason
    assert {"decoupled_lr", "tiktoken_pattern", "use_megatron_fsdp", "rerun_mode", "moe_permute_fusion"} <= FLAGS.keys()
    assert sum(not flag.older for flag in FLAGS.values()) == 878 - 2 + 22  # two are spelled with - and with _


OLD = """legacy_tokenizer data_impl mmap_warmup no_delay_grad_reduce scaled_masked_softmax_fusion use_gpu_initialization
use_contiguous_buffers_in_ddp
renormalize_blend_weights enable_onelogger erf_gelu fp32_allreduce start_wd layernorm_epsilon
multi_query_attention moe_frequency expert_parallel checkpoint_granularity use_custom_fsdp s3_cache_path
standalone_embedding_stage retro_add_retriever pipeline_model_parallel_split_rank hybrid_attention_ratio
inference_max_batch_size""".split()


@pytest.mark.parametrize("name", OLD)
def test_flags_of_older_scripts_are_known(name: str) -> None:
    """All 930 that the arguments file had at any time were compared; these are of each kind."""
    value = {"data_impl": "mmap", "expert_parallel": "1"}.get(name, "")
    problems = problems_of([*argv(), flag_of(name), *value.split()])
    assert FLAGS[name].older and not any("unknown flag" in line for line in problems), problems
    assert (FLAGS[name].verdict == "ignored") == (not problems), problems


def _with_value(flag: MegatronFlag) -> list[str]:
    return [flag_of(flag.name), *([flag.values[0] if flag.values else "1"] if flag.takes else [])]


def test_every_ignored_flag_is_accepted_and_named() -> None:
    ignored = [flag for flag in FLAGS.values() if flag.verdict == "ignored"]
    words = [word for flag in ignored for word in _with_value(flag)]
    parsed = parse_with_origins([*argv(), *words])
    assert parsed.ignored == tuple(flag_of(flag.name) for flag in ignored)
    assert parsed.config == parse(argv())


def test_tools_name_what_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside their answer, which a program may read."""
    assert without_effect(argv()) is None
    name_ignored([*argv(), "--manual-gc", "--rerun-mode", "disabled"])
    line = "Megatron-LM flags without effect here (docs/megatron_flags.md): --manual-gc, --rerun-mode\n"
    assert capsys.readouterr() == ("", line)


def test_every_refused_flag_gives_its_reason() -> None:
    refused = [flag for flag in FLAGS.values() if flag.verdict == "refused"]
    problems = problems_of([*argv(), *(flag_of(flag.name) for flag in refused)])
    assert problems == [f"{flag_of(flag.name)}: {spelled(flag.reason, shown_flag)}" for flag in refused]


WRONG = {
    "--rerun-mode validate_results": "--rerun-mode=validate_results: results are not computed twice",
    "--rope-type ring": "--rope-type=ring: choose rope or yarn",
    "--rotary-scaling-factor 4": "--rotary-scaling-factor=4: Megatron-LM reads it for latent attention; drop it",
    "--multi-latent-attention --rotary-scaling-factor 4 --rope-type rope": "--rotary-scaling-factor=4: contradicts",
    "--multi-latent-attention --rotary-scaling-factor 4 --rope-scaling factor=8": "--rotary-scaling-factor=4: contradi",
    "--manual-gc yes": "unexpected argument 'yes'",
    "--bf16 '--swiglu'": "unexpected argument '--swiglu'; its quotation marks are part of it; leave them out",
    "--attention-backend": "--attention-backend: expected a value",
    "--manual-gc-interval 1 2": "unexpected argument '2'",
    "--use-megatron-fsdp --zero-stage 1": "--zero-stage=1: contradicts --use-megatron-fsdp, which is stage 3",
    "--data-parallel-sharding-strategy optim": "--data-parallel-sharding-strategy: goes with --use-megatron-fsdp",
    "--use-megatron-fsdp --data-parallel-sharding-strategy all": "--data-parallel-sharding-strategy=all: choose from",
    "--no-position-embedding": "--no-position-embedding: say which instead",
    "--no-manual-gc": "--no-manual-gc: drop it: memory and collection of garbage",
    "--lr '1e-3'": "--lr='1e-3': the quotation marks are part of the value",
    "--bf16='true'": "--bf16='true': the quotation marks are part of the value",
    '--tokenizer-model "a': '--tokenizer-model="a: the quotation marks are part of the value',
    "--no-mmap-bin-file": "unknown flag --no-mmap-bin-file; see --help",
    "--attention-backend flashh": "--attention-backend=flashh: choose from auto, flash, fused",
    "--moe-token-drop-policy random": "--moe-token-drop-policy=random: the last tokens of a sequence are dropped",
    "--export-model-type GPTModel": "--export-model-type: models are decoders",
    "--modelopt-enabled": "--modelopt-enabled: Model Optimizer (modelopt), which quantizes",
}


PROBS = "--moe-token-drop-policy=probs: the last tokens of a sequence are dropped, so that layouts drop the same ones"
CAPACITY = "--num-experts 4 --moe-expert-capacity-factor 1"


def test_which_tokens_are_dropped_is_asked_where_some_are(tmp_path: Path) -> None:
    """`probs` is Megatron-LM's default, which its scripts also name beside no capacity."""
    probs, file = "--moe-token-drop-policy probs", tmp_path / "run.yaml"
    file.write_text("moe_token_drop_policy: probs\n")
    for words in (probs, f"--num-experts 4 {probs}", f"{CAPACITY} {probs} --moe-token-drop-policy position"):
        assert parse_with_origins([*argv(), *words.split()], world_size=1).ignored == ("--moe-token-drop-policy",)
    assert problems_of([*argv(), *CAPACITY.split(), *probs.split()], 1) == [PROBS]
    words = [*argv(), *CAPACITY.split(), "--config", str(file)]
    assert problems_of(words, 1) == [PROBS.replace("--moe-token-drop-policy", f"{file}:1: moe_token_drop_policy")]
    assert problems_of([*words, "--moe-token-drop-policy", "position"], 1) == []


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_said(words: str) -> None:
    problems = problems_of([*argv("--lr 1e-3"), *words.split()], 1)
    assert any(line.startswith(WRONG[words]) for line in problems), problems


def test_a_flag_and_its_value_in_one_word_are_named() -> None:
    (line,) = problems_of([*argv(), "--fp8-format hybrid"], 1)
    assert (
        line == "unknown flag --fp8-format hybrid: a flag and its value in one word; leave out the quotes around them"
    )


MLA = "--multi-latent-attention --position-embedding-type rope"
YARN = "--rope-scaling type=yarn factor=40 original_length=4096"
SAME = {
    "--use-megatron-fsdp --use-distributed-optimizer": "--zero-stage 3",
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads": "--zero-stage 2",
    "--use-torch-fsdp2": "--zero-stage 3",
    "--openai-gelu": "--activation gelu-tanh",
    "--no-position-embedding --position-embedding-type rope": "--position-embedding-type rope",
    "--window-size 3,0": "--window-size 4",
    "--window-size (3,0)": "--window-size 4",
    "--split '90,9,1'": "--split 90,9,1",
    "--optimizer dist_muon": "--optimizer muon",
    f"{MLA} --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 0.7": f"{MLA} {YARN} mscale=1 mscale_all_dim=0.7",
    f"{MLA} --rotary-scaling-factor 40 --mscale-all-dim 0.7": f"{MLA} {YARN} mscale=1 mscale_all_dim=0.7",
    f"{MLA} --rotary-scaling-factor 40 --mscale 1.0 --rope-type yarn": f"{MLA} {YARN}",
    f"{MLA} --rotary-scaling-factor 1 --mscale 1.0": MLA,  # Megatron-LM's defaults
    f"{MLA} --rope-type rope": MLA,
    "--persistent-save-interval 5 --save x": "--save-interval 5 --save x",
}


@pytest.mark.parametrize("words", SAME)
def test_what_is_spelled_otherwise_means_the_same(words: str) -> None:
    assert parse([*argv(), *words.split()]) == parse([*argv(), *SAME[words].split()])


OTHERWISE = "not given, and otherwise in Megatron-LM: "
DROPOUTS = "--hidden-dropout 0 (there 0.1), --attention-dropout 0 (there 0.1)"
ALIKE = "--manual-gc --swiglu --hidden-dropout 0 --attention-dropout 0"
GELU = "--activation gelu, exact (there fused with the bias: gelu-tanh)"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", None),
        ("--bf16", None),  # says nothing of whose script it is
        ("--use-flash-attn", f"{DROPOUTS}, {GELU}"),
        ("--use-distributed-optimizer", None),
        ("--no-bias-gelu-fusion", DROPOUTS),
        ("--manual-gc --disable-bias-linear", DROPOUTS),  # there it fuses GELU with a bias alone
        ("--swiglu", None),
        ("--swiglu --manual-gc --hidden-dropout 0", "--attention-dropout 0 (there 0.1)"),
        ("--swiglu --manual-gc --hidden-dropout 0.1 --attention-dropout 0.0", None),
        ("--manual-gc --hidden-dropout 0 --attention-dropout 0 --activation gelu", None),
        (f"{ALIKE} --fp8-format hybrid", "--fp8-recipe tensorwise (there delayed)"),
        (
            f"{ALIKE} --fp8-format hybrid --fp8-amax-history-len 1024",
            "--fp8-recipe tensorwise, which reads no --fp8-amax-history-len (there delayed)",
        ),
        (f"{ALIKE} --fp8-format hybrid --fp8-recipe delayed", "--fp8-amax-history-len 1024 (there 1)"),
        (f"{ALIKE} --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024", None),
        (f"{ALIKE} --fp8-format hybrid --fp8-recipe tensorwise", None),
        (f"{ALIKE} --optimizer muon", "--muon-extra-scale-factor 0.2 (there 1)"),
        (f"{ALIKE} --optimizer dist_muon --muon-extra-scale-factor 1", None),
        (f"{ALIKE} --muon-extra-scale-factor 0.2 --optimizer muon", None),
    ],
)
def test_what_a_script_left_to_other_defaults_is_said(words: str, said: str | None) -> None:
    warnings = parse_with_origins([*argv(), *words.split()]).warnings
    assert [line for line in warnings if line.startswith(OTHERWISE)] == ([] if said is None else [OTHERWISE + said])


DEEPSEEK = "--num-layers 61 --mtp-num-layers 1 --position-embedding-type rope --pipeline-model-parallel-size 16"


def test_a_layout_says_how_many_chunks_a_rank_has() -> None:
    """Megatron-LM's scripts give no virtual size beside it."""
    layout = "Et*2|(tt|)*29,t|mL"
    words = [*argv(DEEPSEEK), "--global-batch-size", "32", "--pipeline-model-parallel-layout"]
    config = parse([*words, layout], world_size=16)
    assert config.parallel.virtual_pipeline_model_parallel_size == 2
    assert parse([*words, "Et*7|(t*4|)*13tt|mL"], world_size=16).parallel.virtual_pipeline_model_parallel_size is None
    (line,) = problems_of([*words, layout.replace("mL", "mmL")], 16)
    assert line.endswith("2 times m; --mtp-num-layers is 1")
    (line,) = problems_of([*words, "Et*3|(tt|)*29,m|L"], 16)
    assert "write mL at the end; also, stage 30 holds no layer" in line
    (line,) = problems_of([*words, layout, "--virtual-pipeline-model-parallel-size", "4"], 16)
    assert "32 stages, but pipeline ranks times chunks per rank are 64" in line


def test_a_schedule_that_a_shell_took_apart_is_read() -> None:
    config = parse([*argv(), "--step-batch-size-schedule", "0:2", "1K:4"])
    assert config.training.batch_ramp.step_batch_size_schedule == "0:2 1K:4"


def test_ignored_keys_of_a_file_are_named_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("manual_gc: true\nrerun_mode: disabled\nmanual_gc_interval: 5\n")
    assert parse_with_origins([*argv(), "--config", str(file)]).ignored == tuple(
        f"{file}:{line}: {key}" for line, key in enumerate(("manual_gc", "rerun_mode", "manual_gc_interval"), 1)
    )


def test_a_run_that_must_find_a_checkpoint_does_not_begin_anew(tmp_path: Path) -> None:
    """As Megatron-LM, which exits; without the flag an empty directory that is also `--save` is a fresh start."""
    empty, words = tmp_path / "run", "--exit-on-missing-checkpoint"
    both = [*argv(), "--save", str(empty), "--load", str(empty)]
    parse(both, read_offer=offer_of)
    for flags in ([*both, words], [*argv(), "--save", str(empty), "--auto-resume", words]):
        with pytest.raises(ConfigError) as caught:
            parse(flags, read_offer=offer_of)
        (line,) = caught.value.problems
        assert line == f"--load={empty}: no committed checkpoint; {words} needs one"
    parse([*both, "--no-exit-on-missing-checkpoint"], read_offer=offer_of)
    (line,) = parse_with_origins([*argv(), words], read_offer=offer_of).warnings
    assert line == f"{words}: has no effect without --load; add that, or drop this"
