"""Every file in configs/ is legal at the world size it states, and its arithmetic in comments is right."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml

from megalite.config import Config, parse, with_vocab_size
from megalite.inventory.layers import count_active_parameters, count_parameters

CONFIGS = Path(__file__).parents[3] / "configs"

# File -> (ranks, vocabulary of its tokenizer where the file does not state it)
WORLDS = {
    "quickstart.yaml": (1, 4096),
    "quickstart_experts.yaml": (1, 4096),
    "shakespeare_char.yaml": (1, 65),
    "gpt2_124m.yaml": (8, None),
    "gpt2_345m.yaml": (8, None),
    "llama_1b.yaml": (8, None),
    "llama_1b_128k.yaml": (8, None),
    "llama_7b.yaml": (64, None),
    "olmo3_7b.yaml": (64, None),
    "mixtral_8x7b.yaml": (64, None),
    "gpt3_175b.yaml": (1024, None),
    "qwen3_30b_a3b.yaml": (32, None),
    "gpt_oss_20b.yaml": (16, None),
    "deepseek_v3.yaml": (2048, None),
    "qwen3_next_80b_a3b.yaml": (64, None),
    "frontier_22b.yaml": (32, None),
    "frontier_175b.yaml": (1024, None),
    "frontier_1t.yaml": (3072, None),
    "frontier_sparse.yaml": (1536, None),
}
# Files that a user brings; none of them is read here.
BROUGHT = {
    "GPT2BPETokenizer": ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"],
    "HuggingFaceTokenizer": ["--tokenizer-model", "tokenizer.json"],
    "SentencePieceTokenizer": ["--tokenizer-model", "tokenizer.model"],
}


def load(name: str) -> tuple[Config, int, str]:
    text = (CONFIGS / name).read_text()
    world_size, vocabulary = WORLDS[name]
    kind = re.search(r"tokenizer_type: (\w+)", text)
    assert kind is not None
    flags = BROUGHT.get(kind[1], [])
    config = parse(["--config", str(CONFIGS / name), *flags], world_size=world_size, check_files=False)
    return with_vocab_size(config, vocabulary) if vocabulary else config, world_size, text


def readme_commands() -> list[list[str]]:
    """Arguments of the commands of README.md that train with a shipped file."""
    text = (CONFIGS.parent / "README.md").read_text().replace("\\\n", " ")
    commands = [
        shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("python pretrain_gpt")
    ]
    return [words[2:] for words in commands if "..." not in words]


@pytest.mark.parametrize("argv", readme_commands(), ids=" ".join)
def test_commands_of_the_readme_are_legal(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    parse(argv, check_files=False)


def comment_of(text: str) -> str:
    return " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))


def test_every_shipped_file_is_tested() -> None:
    assert {path.name for path in CONFIGS.glob("*.yaml")} == set(WORLDS)


@pytest.mark.parametrize("name", WORLDS)
def test_shipped_configuration_and_its_arithmetic(name: str) -> None:
    config, world_size, text = load(name)
    comment = comment_of(text)
    assert f"parameters        {count_parameters(config.model):,} " in text
    tokens = config.global_batch_size(world_size) * config.model.seq_length
    assert f"= {tokens:,}" in comment
    if config.training.length.train_tokens is not None:
        assert f"= {config.train_iterations(world_size):,} steps" in comment
    if config.training.seq_length_schedule is not None:
        assert f"the first {config.phases(world_size)[0][1]:,} of them" in comment
    checked = [equation for equation in equations(text) if not re.search("GB|%|billion", equation)]
    assert checked
    for equation in checked:
        left, right = (value_of(side) for side in equation.split(" = "))
        assert left == right, f"{equation}: {left:,} is not {right:,}"
    state = re.search(r"state a GPU.*= ([\d.]+) GB", text)
    if state is not None:
        alike = config.gradient_ranks(world_size)
        per_rank = count_parameters(config.model) / (world_size / alike)
        gigabytes = per_rank * (6 + 12 / alike) / 1e9
        assert float(state[1]) == pytest.approx(gigabytes, abs=0.051)


@pytest.mark.parametrize("name", [name for name in WORLDS if "num_experts" in (CONFIGS / name).read_text()])
def test_recipes_of_sparse_models_are_compiled(name: str) -> None:
    """A small one may be tried on a CPU, where a compiler takes longer than the run."""
    assert load(name)[0].training.compile != name.startswith("quickstart")


# File -> (parameters, those of a token) as published: model cards (Qwen's file has 30,532,122,624 elements) and
# arXiv 2312.12705; how far off the rounding is.
PUBLISHED = {
    "mixtral_8x7b.yaml": (46_702_792_704, 12_879_925_248, 1e-9),
    "qwen3_30b_a3b.yaml": (30_532_122_624, None, 0.0),
    "qwen3_next_80b_a3b.yaml": (79_674_391_296, None, 0.0),
    "deepseek_v3.yaml": (671_026_404_352, 37_552_282_624, 0.0),
    "gpt_oss_20b.yaml": (20_914_757_184, None, 0.0),
    "frontier_22b.yaml": (22e9, None, 5e-3),
    "frontier_175b.yaml": (175e9, None, 5e-3),
    "frontier_1t.yaml": (1e12, None, 1e-2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    model, (total, active, off) = load(name)[0].model, PUBLISHED[name]
    assert count_parameters(model) == pytest.approx(total, rel=off)
    if active is not None:
        assert count_active_parameters(model) == pytest.approx(active, rel=off)


def equations(text: str) -> list[str]:
    """The `expression = expression` parts of the indented lines of the head comment, continuation lines joined."""
    lines = " ".join(re.sub(r"^#   ( {18})?(\w[\w ]*?  +)?", "" if line[4] == " " else "; ", line)
                     for line in text.splitlines() if line.startswith("#   ") and "torchrun" not in line
                     and "python" not in line and "--tokenizer" not in line)  # fmt: skip
    parts = re.split(r"; |: |, asked|, (?=[a-z])", lines)
    return [part for part in parts if part.count(" = ") == 1 and re.search(r"\d [*/] \d|\d [a-z-]+ \* \d", part)]


def value_of(side: str) -> int:
    """Value of sums, products and powers of integers with thousands separators; words in between are units."""
    plain = re.sub(r"\([a-z][^)]*(\)|$)|[A-Za-z-]+", " ", side.replace(",", "")).replace("^", "**")

    def walk(node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            return int(node.value)
        assert isinstance(node, ast.BinOp), side
        left, right = walk(node.left), walk(node.right)
        if isinstance(node.op, ast.Pow):
            return left**right
        return left + right if isinstance(node.op, ast.Add) else left * right

    return walk(ast.parse(plain.strip(), mode="eval").body)


def test_the_character_recipe_is_the_published_one() -> None:
    config, _, _ = load("shakespeare_char.yaml")
    model, training, optimizer = config.model, config.training, config.optimizer
    assert (model.num_layers, model.num_attention_heads, model.hidden_size, model.seq_length) == (4, 4, 128, 64)
    assert (training.micro_batch_size, training.global_batch_size, training.length.train_iters) == (12, 12, 2000)
    assert (optimizer.lr, optimizer.min_lr, optimizer.lr_decay_style, optimizer.lr_warmup.lr_warmup_iters) == (
        1e-3,
        1e-4,
        "cosine",
        100,
    )
    assert (optimizer.args.adam_beta1, optimizer.args.adam_beta2, optimizer.weight_decay, optimizer.clip_grad) == (
        0.9,
        0.99,
        0.1,
        1.0,
    )
    assert (model.hidden_dropout, model.attention_dropout, model.add_bias_linear) == (0.0, 0.0, False)
    assert not model.untie_embeddings_and_output_weights and config.padded_vocab_size() == 65


def test_the_175b_recipe_ramps_up_in_whole_pipelines() -> None:
    config, world_size, _ = load("gpt3_175b.yaml")
    schedule = config.batch_size_schedule(world_size)
    assert (config.data_parallel_size(world_size), config.num_microbatches(world_size)) == (8, 192)
    assert schedule.sizes == tuple(range(128, 1537, 128))
    assert config.total_train_samples(world_size) >= 146_484_375


def test_the_tutorials_held_out_curve_has_points_to_watch() -> None:
    """Its page says when to stop by that curve: one measurement, at the end, would draw none."""
    page = (CONFIGS.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (story,) = re.findall(r"```yaml\n(# story.yaml\n.*?)```", page, re.S)
    (iterations,) = set(re.findall(r"story.yaml --train-iters (\d+)\n", page))
    interval = yaml.safe_load(story)["training"]["eval_interval"]
    assert int(iterations) // interval >= 5
    assert f"Every {interval} iterations and at the end the model is measured" in page
