"""Folders of other people with programs in them, at every place that reads one, while standard input says yes.

A program leaves a file where it ran. None may; a place that cannot do without it says so in one line.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
ALL_NAMES = (
    "AutoTokenizer AutoConfig AutoModel AutoModelForCausalLM AutoProcessor AutoImageProcessor AutoFeatureExtractor "
    "AutoVideoProcessor"
).split()
#: Whatever transformers reads, in each of the forms that name a program.
FILES = (
    "tokenizer_config.json config.json processor_config.json preprocessor_config.json generation_config.json "
    "adapter_config.json special_tokens_map.json feature_extractor_config.json"
).split()
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 256}
LLAMA = SIZES | {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
CHATML = "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
CHATML += "{% if add_generation_prompt %}assistant:{% endif %}"


def program(marker: Path) -> str:
    """Runs at import, and offers every class that somebody may ask it for."""
    return f"open({str(marker)!r}, 'a').write(__name__)\nclass Evil(dict): pass\n"


def plant(folder: Path, marker: Path, form: Any, files: list[str] = FILES) -> Path:
    """A tokenizer and a Llama with a program beside them, which `files` name by `form`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(folder / "tokenizer.json"))
    contents: dict[str, dict[str, Any]] = {name: {} for name in files}
    contents["tokenizer_config.json"] = {"chat_template": CHATML, "tokenizer_class": "EvilTokenizer"}
    contents["config.json"] = LLAMA | {"model_type": "llama", "architectures": ["Evil"], "tie_word_embeddings": True}
    for name, content in contents.items():
        named = {"auto_map": form} if name in files else {}
        (folder / name).write_text(json.dumps(content | named))
    for name in (
        "evil",
        "tokenization_evil",
        "modeling_evil",
        "configuration_evil",
        folder.name,
        "custom_generate/generate",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(program(marker))
    h, f, v = 16, 32, 256
    shapes = {"self_attn.q_proj": (h, h), "self_attn.k_proj": (h, h), "self_attn.v_proj": (h, h)}
    shapes |= {"self_attn.o_proj": (h, h), "mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f)}
    shapes |= {"input_layernorm": (h,), "post_attention_layernorm": (h,)}
    tensors = {f"model.layers.0.{name}.weight": torch.ones(shape) / 100 for name, shape in shapes.items()}
    tensors |= {"model.embed_tokens.weight": torch.ones(v, h) / 100, "model.norm.weight": torch.ones(h)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


#: Ways in which a file names a program.
FORMS: dict[str, Any] = {
    "one name": {name: "evil.Evil" for name in ALL_NAMES},
    "slow and fast": {name: ["tokenization_evil.Evil", "evil.Evil"] for name in ALL_NAMES},
    "slow alone": {"AutoTokenizer": ["evil.Evil", None]},
    "fast alone": {"AutoTokenizer": [None, "evil.Evil"]},
    "a list": ["evil.Evil", "evil.Evil"],
    "text": "evil.Evil",
    "a folder above": {name: "../up/evil.Evil" for name in ALL_NAMES},
    "somebody's repository": {name: "somebody/evil--evil.Evil" for name in ALL_NAMES},
}


def place(name: str, planted: Path, folder: Path) -> list[str]:
    """The command that reads the planted folder; each ends by itself."""
    talks = folder / "talks.jsonl"
    talks.write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    )
    (folder / "text.jsonl").write_text('{"text": "abc"}\n' * 9)
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {planted}"
    out = f"--output-prefix {folder / 'out'} --workers 1"
    train = (
        f"--data-path {folder / 'text.jsonl'} --train-iters 1 --seq-length 8 --lr 1e-3 --data-cache-path {folder / 'c'}"
    )
    convert = f"tools/convert_checkpoint.py --from hf --to megalite --load {planted} --save {folder / 'm'}"
    small = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --micro-batch-size 1 --device cpu"
    commands = {
        "chat": f"tools/preprocess_data.py --data-format chat --input {talks} {tokenizer} {out}",
        "chat by file": f"tools/preprocess_data.py --data-format chat --input {talks} {tokenizer}/tokenizer.json {out}",
        "text": f"tools/preprocess_data.py --input {folder / 'text.jsonl'} {tokenizer} {out}",
        "verify": f"{convert} --verify",
        "convert": convert,
        "train": f"pretrain_gpt.py {tokenizer} {train} {small}",
        "start from": f"pretrain_gpt.py --load {planted} {train} --micro-batch-size 1 --device cpu",
        "lora": f"pretrain_gpt.py --load {planted} --lora rank=2 {train} --micro-batch-size 1 --device cpu",
        "evaluate": f"tools/evaluate.py --load {planted} --text-file {folder / 'text.jsonl'}",
        "generate": f"tools/generate_text.py --load {planted} --prompt a --max-new-tokens 2",
        "data set": f"tools/preprocess_data.py --input {planted} {out}",
        "data set by name": f"tools/preprocess_data.py --input hf:{planted} {out}",
        "inspect": f"tools/inspect_checkpoint.py {planted}",
    }
    return commands[name].split()


REFUSE = ("chat", "chat by file", "verify")  # they would have to; elsewhere a program is nothing that is looked at
PLACES = (
    *REFUSE,
    "text",
    "convert",
    "train",
    "start from",
    "lora",
    "evaluate",
    "generate",
    "data set",
    "data set by name",
)
PLACES += ("inspect",)


def run(command: list[str], folder: Path) -> tuple[int, str]:
    """With a standard input that answers yes to everything, and no network."""
    answers = folder / "yes"
    answers.write_text("yes\n" * 1000)
    caches = {name: str(folder / "hf") for name in ("HF_HOME", "HF_MODULES_CACHE")}
    with answers.open() as stdin:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, stdin=stdin, capture_output=True, text=True, timeout=300,
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **caches},
        )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", [n if n in ("chat", "verify", "data set by name") else
                                  pytest.param(n, marks=pytest.mark.full) for n in PLACES])  # fmt: skip
def test_no_program_runs_at_any_place(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("datasets", reason="datasets is not installed")
    planted, marker = plant(tmp_path / "planted", tmp_path / "ran", FORMS["one name"]), tmp_path / "ran"
    status, output = run(place(name, planted, tmp_path), tmp_path)
    assert not marker.exists(), output
    assert "Traceback" not in output, output
    if name in REFUSE:
        says = [line for line in output.splitlines() if line.startswith("error: ")]
        assert status == 2 and len(says) == 1, output
        assert "config.json names a program to run (auto_map: 'evil.Evil')" in says[0]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_that_names_a_program_is_refused(form: str, tmp_path: Path) -> None:
    from megalite.data.chat import read_template
    from megalite.errors import ConfigError
    from megalite.strangers import check_model_folder, load_causal_model

    for file in ("tokenizer_config.json", "config.json"):
        planted = plant(tmp_path / file.split("_")[0].split(".")[0], tmp_path / "ran", FORMS[form], [file])
        names_tokenizer = file.startswith("tokenizer") or (
            isinstance(FORMS[form], dict) and "AutoTokenizer" in FORMS[form]
        )
        if names_tokenizer:
            with pytest.raises(ConfigError, match=f"{file} names a program to run"):
                read_template(planted)
        else:
            read_template(planted)
        if file == "config.json":
            with pytest.raises(ConfigError, match=f"{file} names a program to run"):
                check_model_folder(planted, "--load")
            with pytest.raises(ConfigError, match=f"{file} names a program to run"):
                load_causal_model(planted, "LlamaForCausalLM", torch.float32, "--verify")
    assert not (tmp_path / "ran").exists()


def test_adapters_beside_a_model_lead_nowhere(tmp_path: Path) -> None:
    """Their `base_model_name_or_path` would be loaded in its place, whatever is there."""
    from megalite.errors import ConfigError
    from megalite.strangers import load_causal_model

    planted = plant(tmp_path / "model", tmp_path / "ran", {}, [])
    (planted / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "other")}))
    with pytest.raises(ConfigError, match="adapter_config.json names another model"):
        load_causal_model(planted, "LlamaForCausalLM", torch.float32, "--verify")


@pytest.mark.parametrize(
    "change",
    [
        {"_attn_implementation": "somebody/kernels"},
        {"attn_implementation": "somebody/kernels@main:evil"},
        {"num_hidden_layers": "1; import os"},
        {"quantization_config": {"quant_method": "evil"}},
        {"dtype": "__import__('os')"},
        {"rope_scaling": {"rope_type": "evil"}},
    ],
)
def test_what_else_config_json_may_name_is_not_fetched(change: Any, tmp_path: Path) -> None:
    """A model of transformers' own code, or one line."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from megalite.errors import ConfigError
    from megalite.strangers import load_causal_model

    planted = plant(tmp_path / "model", tmp_path / "ran", {}, [])
    config = json.loads((planted / "config.json").read_text())
    (planted / "config.json").write_text(json.dumps(config | change))
    try:
        model = load_causal_model(planted, "LlamaForCausalLM", torch.float32, "--verify")
    except ConfigError as error:
        assert "transformers cannot load it" in str(error) and "\n" not in str(error)
    else:
        assert model.config._attn_implementation == "eager"
    assert not (tmp_path / "ran").exists()


def test_pickles_of_a_model_are_not_opened(tmp_path: Path) -> None:
    """A folder whose weights are a pickle alone."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from megalite.errors import ConfigError
    from megalite.strangers import load_causal_model

    planted = plant(tmp_path / "model", tmp_path / "ran", {}, [])
    (planted / "model.safetensors").unlink()
    shutil.copy(__file__, planted / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="transformers cannot load it"):
        load_causal_model(planted, "LlamaForCausalLM", torch.float32, "--verify")
