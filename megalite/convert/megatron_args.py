"""Megatron-LM's `args`: the settings of a model there, read into a ModelConfig and written from one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megalite.config import Experts, ModelConfig, RopeScaling, pattern_text
from megalite.convert.fields import Fields
from megalite.convert.llama import MOST_EXPERTS
from megalite.convert.registry import check_shape, lost_settings
from megalite.errors import ConfigError

TENSOR_PARALLEL = "`target_tensor_model_parallel_size`"
SWITCHES = ("add_qkv_bias", "qk_layernorm", "apply_layernorm_1p", "untie_embeddings_and_output_weights")
# Arguments whose names and values are those of ModelConfig and of Experts.
SAME = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "position_embedding_type", "rotary_percent",
    "normalization", "norm_epsilon", "add_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights",
    "hidden_dropout", "attention_dropout", "init_method_std", "make_vocab_size_divisible_by", "apply_layernorm_1p",
)  # fmt: skip
SIZES_OF_EXPERTS = (
    "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_num_groups", "moe_router_group_topk",
)  # fmt: skip
SAME_OF_EXPERTS = (
    *SIZES_OF_EXPERTS, "num_experts", "moe_router_topk", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias", "moe_router_bias_update_rate",
)  # fmt: skip
# Settings that change what the weights compute in a way that we do not have -> the value that does not.
REFUSED: Mapping[str, Any] = {
    "multi_latent_attention": False,
    "is_hybrid_model": False,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
    "experimental_attention_variant": None,
    "mtp_num_layers": 0,
    "attn_logit_softcapping": None,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "rotary_interleaved": False,
    "apply_residual_connection_post_layernorm": False,
    "quick_geglu": False,
    "use_mup": False,
}
POSITIONS = ("learned_absolute", "rope", "none")
# The same settings of blocks with experts.
REFUSED_WITH_EXPERTS: Mapping[str, Any] = {
    "moe_expert_capacity_factor": None,  # there it drops tokens in evaluation too
    "moe_shared_expert_gate": False,
    "moe_apply_probs_on_input": False,
    "moe_router_topk_limited_devices": None,
    "moe_latent_size": None,
}
NORMS, SINKS = ("LayerNorm", "RMSNorm"), ("vanilla", "off-by-one", "learnable")
BALANCING = ("aux_loss", "seq_aux_loss", "none")
SCORES = ("softmax", "sigmoid")


def read_args(raw: Mapping[str, Any], where: str, *, legacy: bool, rows: int, vocab_size: int | None) -> ModelConfig:
    """The `args` of a file -> the model.

    rows: of the embedding, padding included. vocab_size: those that are tokens; None takes what the file says, else
    all. legacy: the names are those before megatron.core. Raises ConfigError for what we do not have.
    """
    fields = Fields(raw, where)
    fields.fixed(REFUSED)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    activation = _activation(fields, legacy)
    positions = fields.integer("max_position_embeddings")
    size = (_stated_vocab_size(fields) or rows) if vocab_size is None else vocab_size
    if not 0 < size <= rows:
        raise ConfigError(f"`true_vocab_size`={size}: the embedding has {rows} rows")
    switches: dict[str, Any] = {name: fields.flag(name, False) for name in SWITCHES}
    biases = fields.flag("add_bias_linear", not fields.flag("disable_bias_linear", False))
    model = ModelConfig(
        model_type="llama" if activation == "swiglu" else "gpt",
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
        normalization=_chosen(fields, "normalization", NORMS),
        softmax_type="vanilla" if legacy else _chosen(fields, "softmax_type", SINKS),
        norm_epsilon=fields.number("norm_epsilon", fields.number("layernorm_epsilon", 1e-5)),
        activation=activation,
        add_bias_linear=biases,
        **switches,
        init_method_std=fields.number("init_method_std", 0.02),
        vocab_size=size,
        make_vocab_size_divisible_by=fields.integer("make_vocab_size_divisible_by", 128),
        experts=read_experts(fields, legacy),
        **_read_positions(fields),
    )
    check_shape(model, where)
    return model


def _chosen(fields: Fields, key: str, values: Sequence[str]) -> str:
    """A word that means the same on both sides; the first where none is there."""
    return fields.choice(key, {value: value for value in values}, values[0])


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
    kind = _chosen(fields, "position_embedding_type", POSITIONS)
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
    return f"[{','.join(str(int(entry)) for entry in _flags_of_layers(fields, key, value))}]"


def _flags_of_layers(fields: Fields, key: str, value: Any) -> list[int]:
    layers = fields.integer("num_layers")
    if not isinstance(value, list) or len(value) != layers or any(entry not in (0, 1) for entry in value):
        raise fields.wrong(key, value, f"is not a number, nor a list of {layers} of 0 and 1")
    return value


def write_args(model: ModelConfig, implementation: str) -> dict[str, Any]:
    """The entries of `args` that are the model's. Raises ConfigError for what Megatron-LM has not."""
    legacy = implementation == "legacy"
    unwritten = {
        "`multi_latent_attention`": model.latent.multi_latent_attention,
        "`rope_scaling_type`=yarn": model.rope_scaling.kind == "yarn",
        "`mtp_num_layers`": model.further.depth > 0,
        "`experimental_attention_variant`": model.delta.experimental_attention_variant is not None,
    }
    if any(unwritten.values()):
        listed = ", ".join(name for name, given in unwritten.items() if given)
        raise ConfigError(f"not written for Megatron-LM ({implementation}): a model with {listed}; hf and dcp have it")
    rope = model.position_embedding_type == "rope"
    fused = model.activation == "gelu-tanh" and model.add_bias_linear
    scaling = model.rope_scaling
    args: dict[str, Any] = {
        **{name: getattr(model, name) for name in SAME},
        "encoder_num_layers": model.num_layers,
        "ffn_hidden_size": model.ffn_size,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "use_rotary_position_embeddings": rope,
        "add_position_embedding": True,
        "rotary_base": _whole(model.rotary_base),
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": _whole(scaling.rotary_seq_len_interpolation_factor) if rope else None,
        "use_rope_scaling": scaling.use_rope_scaling,
        "rope_scaling_factor": scaling.rope_scaling_factor,
        "apply_residual_connection_post_layernorm": False,
        "apply_query_key_layer_scaling": False,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "squared-relu",
        "openai_gelu": legacy and model.activation == "gelu-tanh" and not fused,
        "bias_gelu_fusion": fused,
        "qk_layernorm": model.qk_layernorm and not legacy,
        "softmax_type": "vanilla" if legacy else model.softmax_type,
        "window_size": None if model.window_size is None or legacy else [model.window_size - 1, 0],
        "window_attn_skip_freq": _each(model, model.has_window) if model.window_attn_skip_freq and not legacy else None,
        "no_rope_freq": _each(model, lambda i: not model.has_rope(i)) if model.no_rope_freq and not legacy else None,
        "true_vocab_size": model.vocab_size,
        **write_experts(model, implementation),
    }
    rows = model.padded_vocab_size(1)
    try:
        lost = list(lost_settings(model, read_args(args, "args", legacy=legacy, rows=rows, vocab_size=None)))
    except ConfigError as error:
        lost = [str(error)]
    if lost:
        raise ConfigError(f"not written for Megatron-LM ({implementation}): a model with {', '.join(lost)}")
    return args


def _each(model: ModelConfig, has: Callable[[int], bool]) -> list[int]:
    return [int(has(index)) for index in range(model.num_layers)]


def _whole(number: float) -> float | int:
    """Megatron's own flags are integers here."""
    return int(number) if number == int(number) else number


def read_experts(fields: Fields, legacy: bool) -> Experts:
    """The entries of `args` about experts. Raises ConfigError for what we do not have."""
    number = fields.get("num_experts")
    if number is None or (type(number) is int and number == 0):
        return Experts()
    if legacy:
        raise fields.wrong("num_experts", number, "not supported with the names before megatron.core")
    if type(number) is not int or not 2 <= number <= MOST_EXPERTS:
        raise fields.wrong("num_experts", number, f"not supported (2 to {MOST_EXPERTS})")
    fields.fixed(REFUSED_WITH_EXPERTS)

    def coefficient(key: str) -> float:
        return fields.number(key) if fields.get(key, 0) != 0 else 0.0

    sizes: dict[str, Any] = {name: fields.integer(name) for name in SIZES_OF_EXPERTS if fields.get(name) is not None}
    biased = fields.flag("moe_router_enable_expert_bias", False)
    scaling = fields.get("moe_router_topk_scaling_factor")
    return Experts(
        **sizes,
        num_experts=number,
        moe_router_topk=fields.integer("moe_router_topk", 2),
        moe_layer_freq=_frequency(fields),
        moe_router_load_balancing_type=_chosen(fields, "moe_router_load_balancing_type", BALANCING),
        moe_aux_loss_coeff=coefficient("moe_aux_loss_coeff"),
        moe_z_loss_coeff=coefficient("moe_z_loss_coeff"),
        moe_router_score_function=_chosen(fields, "moe_router_score_function", SCORES),
        moe_router_pre_softmax=fields.flag("moe_router_pre_softmax", False),
        moe_router_topk_scaling_factor=None if scaling is None else fields.number("moe_router_topk_scaling_factor"),
        moe_router_enable_expert_bias=biased,
        moe_router_bias_update_rate=coefficient("moe_router_bias_update_rate") if biased else 1e-3,
    )


def _frequency(fields: Fields) -> str:
    """A number, or a list of 0 and 1 for each layer."""
    value = fields.get("moe_layer_freq", 1)
    if type(value) is int and value > 0:
        return str(value)
    sparse = _flags_of_layers(fields, "moe_layer_freq", value)
    if not any(sparse):
        raise fields.wrong("moe_layer_freq", value, "leaves no layer with experts")
    return pattern_text(map(bool, sparse))


def write_experts(model: ModelConfig, implementation: str) -> dict[str, Any]:
    """The entries of `args` about experts."""
    given = model.experts
    if given.num_experts is None:
        return {"num_experts": None}
    return {
        **{name: getattr(given, name) for name in SAME_OF_EXPERTS},
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_layer_freq": [int(sparse) for sparse in model.sparse_layers],
        "moe_shared_expert_gate": False,
        "moe_z_loss_coeff": given.moe_z_loss_coeff or None,
        "moe_expert_capacity_factor": None,
        "moe_grouped_gemm": implementation == "transformer_engine",
    }


def cut_problems(model: ModelConfig, tensor: int, pipeline: int, experts: int, within: int) -> Iterator[str]:
    """Why Megatron-LM cannot cut this model so. experts, within: ranks that share the experts, and one expert."""
    number, shared = model.experts.num_experts, model.experts.moe_shared_expert_intermediate_size
    ep, etp = "`target_expert_model_parallel_size`", "`target_expert_tensor_parallel_size`"

    def uneven(flag: str, parts: int, size: int, what: str) -> Iterator[str]:
        if parts < 1 or size % parts:
            yield f"{flag}={parts}: does not divide {size} {what}"

    if number is None:
        wrong = [f"{flag}={size}" for flag, size, usual in ((ep, experts, 1), (etp, within, tensor)) if size != usual]
        yield from (f"{flag}: the model has no experts; drop it" for flag in wrong)
    else:
        yield from uneven(ep, experts, number, "experts")
        if within not in (1, tensor):
            yield f"{etp}={within}: neither 1 nor {TENSOR_PARALLEL}={tensor}"
        else:
            yield from uneven(etp, within, model.expert_ffn_size, "channels of an expert")
        if shared is not None and tensor > 0:
            yield from uneven(TENSOR_PARALLEL, tensor, shared, "channels of the shared expert")
    yield from uneven(TENSOR_PARALLEL, tensor, model.num_attention_heads, "attention heads")
    if tensor < 1 or not model.legal_tensor_size(tensor):
        yield from uneven(TENSOR_PARALLEL, tensor, model.query_groups, "query groups")
    if not all(model.sparse_layers):
        yield from uneven(TENSOR_PARALLEL, tensor, model.ffn_size, "MLP channels")
    yield from uneven("`target_pipeline_model_parallel_size`", pipeline, model.num_layers, "layers")
