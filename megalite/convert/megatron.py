"""Megatron-LM's model: where a logical tensor is in its files, how ranks share it, and its `args`.

    mp_rank_01_000   rank 1 of tensor parallelism, stage 0: layers count from 0 in every stage and virtual stage

Three names for everything: the models before megatron.core (`legacy`), megatron.core with torch's layers (`local`), and
with Transformer Engine's, whose linear layers hold the norm before them (`transformer_engine`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megalite.config import ModelConfig, RopeScaling
from megalite.convert.fields import Fields
from megalite.convert.megatron_cuts import COLUMNS, GATED_ROWS, ROWS, VOCABULARY, WHOLE, RankCut
from megalite.convert.megatron_experts import check_expert_cut, extra_states, read_experts, write_experts
from megalite.convert.registry import check_shape, lost_settings
from megalite.errors import ConfigError

IMPLEMENTATIONS = ("transformer_engine", "local", "legacy")


@dataclass(frozen=True)
class MegatronRule:
    """The logical layer `ours` under Megatron's names, each with what stands before `weight` or `bias`.

    older: names of earlier releases, only read. `{i}` is the number of a block.
    """

    ours: str
    legacy: str
    local: str
    transformer_engine: str = ""
    cut: RankCut = WHOLE
    older: tuple[str, ...] = ()

    def written(self, implementation: str, sparse: bool) -> str:
        """The name in files for `implementation`; empty where it has no such layer. sparse: the block has experts, so
        the norm before them is in no linear layer."""
        if implementation == "legacy":
            return self.legacy
        alone = implementation != "transformer_engine" or (sparse and self.ours.endswith(".mlp_norm"))
        return self.local if alone else self.transformer_engine or self.local


ENCODER, DECODER = "language_model.encoder.", "decoder."
BLOCK, CORE = ENCODER + "layers.{i}.", DECODER + "layers.{i}."

RULES = (
    MegatronRule(
        "embedding.word_embeddings", "language_model.embedding.word_embeddings.", "embedding.word_embeddings.",
        cut=VOCABULARY,
    ),
    MegatronRule(
        "embedding.position_embeddings", "language_model.embedding.position_embeddings.",
        "embedding.position_embeddings.",
    ),
    MegatronRule(
        "layers.{i}.input_norm", BLOCK + "input_norm.", CORE + "input_layernorm.",
        CORE + "self_attention.linear_qkv.layer_norm_", older=(BLOCK + "input_layernorm.",),
    ),
    MegatronRule(
        "layers.{i}.attention.qkv", BLOCK + "self_attention.query_key_value.", CORE + "self_attention.linear_qkv.",
        cut=ROWS,
    ),
    MegatronRule("layers.{i}.attention.q_norm", "", CORE + "self_attention.q_layernorm."),
    MegatronRule("layers.{i}.attention.k_norm", "", CORE + "self_attention.k_layernorm."),
    MegatronRule(
        "layers.{i}.attention.proj", BLOCK + "self_attention.dense.", CORE + "self_attention.linear_proj.", cut=COLUMNS
    ),
    MegatronRule(
        "layers.{i}.mlp_norm", BLOCK + "post_attention_norm.", CORE + "pre_mlp_layernorm.",
        CORE + "mlp.linear_fc1.layer_norm_", older=(BLOCK + "post_attention_layernorm.",),
    ),
    MegatronRule("layers.{i}.mlp.fc1", BLOCK + "mlp.dense_h_to_4h.", CORE + "mlp.linear_fc1.", cut=GATED_ROWS),
    MegatronRule("layers.{i}.mlp.fc2", BLOCK + "mlp.dense_4h_to_h.", CORE + "mlp.linear_fc2.", cut=COLUMNS),
    MegatronRule("layers.{i}.mlp.router", "", CORE + "mlp.router."),
    MegatronRule("layers.{i}.mlp.shared_experts.fc1", "", CORE + "mlp.shared_experts.linear_fc1.", cut=GATED_ROWS),
    MegatronRule("layers.{i}.mlp.shared_experts.fc2", "", CORE + "mlp.shared_experts.linear_fc2.", cut=COLUMNS),
    MegatronRule(
        "head.final_norm", ENCODER + "final_norm.", DECODER + "final_layernorm.", older=(ENCODER + "final_layernorm.",)
    ),
    MegatronRule(
        "head.output", "language_model.output_layer.", "output_layer.",
        cut=VOCABULARY, older=("word_embeddings_for_head.",),
    ),
)  # fmt: skip

# Tied embeddings: the last of several stages holds a copy of the first one's.
COPY = {"legacy": "word_embeddings_for_head.weight", "local": "output_layer.weight"}
# Written with nothing in them, because Transformer Engine's layers miss them in a file.
EXTRA_STATES = ("self_attention.linear_qkv", "self_attention.linear_proj")
# Buffers that are computed anew.
IGNORED = ("_extra_state", "inv_freq", "local_tokens_per_expert")


def rule_of(ours: str) -> tuple[MegatronRule, str]:
    """The rule of a logical tensor, and what `{i}` is in its name."""
    index = ours.split(".")[1] if ours.startswith("layers.") else ""
    layer = ours.rsplit(".", 1)[0]
    template = f"layers.{{i}}.{layer.split('.', 2)[2]}" if index else layer
    return next(rule for rule in RULES if rule.ours == template), index


def name_of(ours: str, implementation: str, layer: int, *, sparse: bool) -> str:
    """The name of a logical tensor in the file of its stage, where its block is number `layer`; sparse: has experts."""
    rule, _ = rule_of(ours)
    return rule.written(implementation, sparse).replace("{i}", str(layer)) + ours.rsplit(".", 1)[1]


def empty_entries(model: ModelConfig, layer: int, *, sparse: bool) -> list[str]:
    """Names that Transformer Engine's layers look for, of the block that is number `layer` in a file."""
    mlp = extra_states(model) if sparse else ("linear_fc1", "linear_fc2")
    before = CORE.replace("{i}", str(layer))
    return [f"{before}{name}._extra_state" for name in (*EXTRA_STATES, *(f"mlp.{each}" for each in mlp))]


def megatron_names() -> Mapping[str, str]:
    """Every name in a file -> its logical tensor's, both with `{i}`."""
    table: dict[str, str] = {}
    for rule in RULES:
        for before in filter(None, (rule.legacy, rule.local, rule.transformer_engine, *rule.older)):
            table |= {before + kind: f"{rule.ours}.{kind}" for kind in ("weight", "bias", "expert_bias")}
    return table


def plain_name(name: str) -> str:
    """A name of the oldest releases as later ones write it."""
    name = name.removeprefix("module.")
    if name.startswith("language_model."):
        name = re.sub(r"^language_model\.transformer\.", ENCODER, name).replace(".attention.", ".self_attention.")
    return name


def untangle(model: ModelConfig, qkv: Tensor, version: float) -> Tensor:
    """Rows of q, k and v as files of version 2 and later have them: for every head q, k, v of its channels.

    Version 0 holds all q, then all k, then all v of a rank; version 1 holds q, k, v of every channel side by side.
    """
    if version >= 2:
        return qkv
    rest, d = qkv.shape[1:], model.head_dim
    if version == 0:
        return qkv.reshape(3, -1, d, *rest).transpose(0, 1).reshape(-1, *rest)
    return qkv.reshape(-1, d, 3, *rest).transpose(1, 2).reshape(-1, *rest)


# What changes the function of the weights in a way that we do not have -> the values that leave it as it is.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False,),
    "is_hybrid_model": (False,),
    "hybrid_override_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (0,),
    "softmax_type": ("vanilla",),
    "attn_logit_softcapping": (None,),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "rotary_interleaved": (False,),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "quick_geglu": (False,),
    "use_mup": (False,),
}
POSITIONS = {"learned_absolute": "learned_absolute", "rope": "rope", "none": "none"}


def read_args(raw: Mapping[str, Any], where: str, *, legacy: bool, rows: int, vocab_size: int | None) -> ModelConfig:
    """The `args` of a file -> the model.

    rows: of the embedding, padding included. vocab_size: those that are tokens; None takes what the file says, else
    all. legacy: the names are those before megatron.core. Raises ConfigError for what we do not have.
    """
    fields = Fields(raw, where)
    for key, allowed in REFUSED.items():
        fields.only(key, *allowed)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    activation = _activation(fields, legacy)
    llama = activation == "swiglu"
    positions = fields.integer("max_position_embeddings")
    size = (_stated_vocab_size(fields) or rows) if vocab_size is None else vocab_size
    if not 0 < size <= rows:
        raise ConfigError(f"--true-vocab-size={size}: the embedding has {rows} rows")
    biases = fields.flag("add_bias_linear", not fields.flag("disable_bias_linear", False))
    model = ModelConfig(
        model_type="llama" if llama else "gpt",
        num_layers=fields.integer("num_layers"),
        hidden_size=hidden,
        ffn_hidden_size=fields.integer("ffn_hidden_size", 4 * hidden),
        num_attention_heads=heads,
        # num_query_groups is 1 there where it means nothing
        num_query_groups=fields.integer("num_query_groups") if fields.flag("group_query_attention", False) else heads,
        kv_channels=fields.integer("kv_channels", max(1, hidden // heads)),
        seq_length=min(fields.integer("seq_length", positions), positions),
        max_position_embeddings=positions,
        window_size=_window(fields),
        window_attn_skip_freq=_pattern(fields, "window_attn_skip_freq") if fields.get("window_size") else None,
        no_rope_freq=_pattern(fields, "no_rope_freq"),
        normalization=fields.choice("normalization", {"LayerNorm": "LayerNorm", "RMSNorm": "RMSNorm"}, "LayerNorm"),
        norm_epsilon=fields.number("norm_epsilon", fields.number("layernorm_epsilon", 1e-5)),
        activation=activation,
        add_bias_linear=biases,
        add_qkv_bias=fields.flag("add_qkv_bias", False),
        qk_layernorm=fields.flag("qk_layernorm", False),
        untie_embeddings_and_output_weights=fields.flag("untie_embeddings_and_output_weights", False),
        init_method_std=fields.number("init_method_std", 0.02),
        vocab_size=size,
        make_vocab_size_divisible_by=fields.integer("make_vocab_size_divisible_by", 128),
        experts=read_experts(fields, legacy),
        **_read_positions(fields),
    )
    check_shape(model, where)
    return model


def _stated_vocab_size(fields: Fields) -> int | None:
    """Tokens without padding, where a file says so: one that we wrote, or one of Megatron's NullTokenizer."""
    if fields.get("true_vocab_size") is not None:
        return fields.integer("true_vocab_size")
    if fields.get("tokenizer_type") == "NullTokenizer" and fields.get("vocab_size") is not None:
        return fields.integer("vocab_size") + 1  # it counts without the end of documents
    return None


def _activation(fields: Fields, legacy: bool) -> str:
    """Megatron's fused GELU is the approximation with tanh, the other one is exact."""
    if fields.flag("swiglu", False):
        return "swiglu"
    if fields.flag("squared_relu", False):
        return "squared-relu"
    if legacy and fields.flag("openai_gelu", False):
        return "gelu-tanh"
    fused = fields.flag("bias_gelu_fusion", False) and fields.flag("add_bias_linear", True)
    return "gelu-tanh" if fused else "gelu"


def _read_positions(fields: Fields) -> dict[str, Any]:
    kind = fields.choice("position_embedding_type", POSITIONS, "learned_absolute")
    if fields.flag("use_rotary_position_embeddings", False):
        kind = "rope"
    elif kind == "learned_absolute" and not fields.flag("add_position_embedding", True):
        kind = "none"
    if kind != "rope":
        return {"position_embedding_type": kind}
    return {
        "position_embedding_type": kind,
        "rotary_base": fields.number("rotary_base", 10000.0),
        "rotary_percent": fields.number("rotary_percent", 1.0),
        "rope_scaling": RopeScaling(
            rotary_seq_len_interpolation_factor=fields.number("rotary_seq_len_interpolation_factor", 1.0),
            use_rope_scaling=fields.flag("use_rope_scaling", False),
            rope_scaling_factor=fields.number("rope_scaling_factor", 8.0),
        ),
    }


def _window(fields: Fields) -> int | None:
    """Megatron counts the tokens to the left, we the token itself too."""
    window = fields.get("window_size")
    if window is None:
        return None
    if not (isinstance(window, list) and len(window) == 2 and type(window[0]) is int and window[0] >= 0):
        raise fields.wrong("window_size", window, "not supported (only a number of tokens to the left, and 0)")
    return int(window[0]) + 1


def _pattern(fields: Fields, key: str) -> str | None:
    """A number, or a list of 0 and 1 for each layer; 0 is none."""
    value = fields.get(key)
    if value is None or (type(value) is int and value >= 0):
        return str(value) if value else None
    layers = fields.integer("num_layers")
    if not isinstance(value, list) or len(value) != layers or any(entry not in (0, 1) for entry in value):
        raise fields.wrong(key, value, f"is not a number, nor a list of {layers} of 0 and 1")
    return f"[{','.join(str(int(entry)) for entry in value)}]"


def write_args(model: ModelConfig, implementation: str) -> dict[str, Any]:
    """The entries of `args` that are the model's. Raises ConfigError for what Megatron-LM has not."""
    legacy = implementation == "legacy"
    rope = model.position_embedding_type == "rope"
    fused = model.activation == "gelu-tanh" and model.add_bias_linear
    scaling = model.rope_scaling
    args: dict[str, Any] = {
        "num_layers": model.num_layers,
        "encoder_num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_dim,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.max_positions,
        "position_embedding_type": model.position_embedding_type,
        "use_rotary_position_embeddings": rope,
        "add_position_embedding": True,
        "rotary_base": _whole(model.rotary_base),
        "rotary_percent": model.rotary_percent,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": _whole(scaling.rotary_seq_len_interpolation_factor) if rope else None,
        "use_rope_scaling": scaling.use_rope_scaling,
        "rope_scaling_factor": scaling.rope_scaling_factor,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": False,
        "apply_residual_connection_post_layernorm": False,
        "apply_query_key_layer_scaling": False,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "squared-relu",
        "openai_gelu": legacy and model.activation == "gelu-tanh" and not fused,
        "bias_gelu_fusion": fused,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm and not legacy,
        "window_size": None if model.window_size is None or legacy else [model.window_size - 1, 0],
        "window_attn_skip_freq": _each(model, model.has_window) if model.window_attn_skip_freq and not legacy else None,
        "no_rope_freq": _each(model, lambda i: not model.has_rope(i)) if model.no_rope_freq and not legacy else None,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "true_vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        **write_experts(model, implementation),
    }
    rows = model.padded_vocab_size(1)
    lost = list(lost_settings(model, lambda: read_args(args, "args", legacy=legacy, rows=rows, vocab_size=None)))
    if lost:
        raise ConfigError(f"Megatron-LM ({implementation}) has no such model: {', '.join(lost)}")
    return args


def _each(model: ModelConfig, has: Callable[[int], bool]) -> list[int]:
    return [int(has(index)) for index in range(model.num_layers)]


def _whole(number: float) -> float | int:
    """Megatron's own flags are integers here."""
    return int(number) if number == int(number) else number


def check_cut(model: ModelConfig, tensor_parallel: int, pipeline_parallel: int, experts: int, within: int) -> None:
    """Raises ConfigError where Megatron-LM cannot cut this model so. experts, within: ranks that share the experts, and
    one expert."""
    tensor, pipeline = "--target-tensor-model-parallel-size", "--target-pipeline-model-parallel-size"
    cuts = (
        (tensor, tensor_parallel, model.num_attention_heads, "attention heads"),
        (tensor, tensor_parallel, model.query_groups, "query groups"),
        *([] if all(model.sparse_layers) else [(tensor, tensor_parallel, model.ffn_size, "MLP channels")]),
        (pipeline, pipeline_parallel, model.num_layers, "layers"),
    )
    problems = check_expert_cut(model, tensor_parallel, experts, within)
    for flag, parts, size, what in cuts:
        if parts < 1 or size % parts:
            problems.append(f"{flag}={parts}: does not divide {size} {what}")
    if problems:
        raise ConfigError(problems)
