"""The model section: the shape of the transformer, its precision details and what is recomputed in backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalite.config.layer_pattern import layer_pattern
from megalite.config.lora import Lora
from megalite.config.model_parts import Delta, Experts, ForeignModule, FurtherTokens, Latent, QKClip, RopeScaling
from megalite.config.mup import Mup, usual_scale
from megalite.config.schema import Section, option, required

ACTIVATIONS = ("gelu", "gelu-tanh", "swiglu", "geglu", "geglu-tanh", "quick-geglu", "squared-relu")
GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu-tanh", "quick-geglu")
#: Pattern of layers -> what those layers do without, and its value there.
WITHOUT: Mapping[str, tuple[str, str | None]] = {
    "window_attn_skip_freq": ("window_size", None),
    "softmax_type_skip_freq": ("softmax_type", "vanilla"),
    "attn_logit_softcapping_skip_freq": ("attn_logit_softcapping", None),
}
SKIPPED = {
    **{pattern: name for pattern, (name, _) in WITHOUT.items()},
    "linear_attention_freq": "experimental_attention_variant",
}
LAYER_PATTERNS = (*SKIPPED, "no_rope_freq")
OWN_PATTERNS = tuple(name for name in LAYER_PATTERNS if name != "linear_attention_freq")

#: What a family changes among the defaults; files and flags override it value by value.
FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gpt": {},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
}


class ModelConfig(Section):
    """Shape of a decoder-only transformer. Fields left at None are derived; the properties below give the numbers."""

    model_type: str = option(
        "gpt",
        "family, which sets defaults: gpt (learned positions, LayerNorm, GELU, biases, tied embeddings) or "
        "llama (RoPE, RMSNorm, SwiGLU, no linear biases, untied)",
        choices=tuple(FAMILY_DEFAULTS),
        free=True,
    )
    num_layers: int = required("transformer layers L", ge=1, le=10_000)
    hidden_size: int = required("width h of the residual stream", ge=1)
    ffn_hidden_size: int | None = option(
        None, "width f of the MLP; unset: 4h, or int(4h * 2/3 / 64) * 64 where it is gated", ge=1
    )
    num_attention_heads: int = required("query heads a", ge=1)
    num_query_groups: int | None = option(
        None, "key/value heads g of grouped-query attention; unset: one per query head", ge=1
    )
    kv_channels: int | None = option(None, "width d of one attention head; unset: h / a", ge=1)
    seq_length: int = required("tokens s of a training sample", ge=1, free=True)
    max_position_embeddings: int | None = option(
        None, "longest sequence the model can represent; unset, or with rope below it: `seq_length`", ge=1
    )
    position_embedding_type: str = option(
        "learned_absolute", "how positions enter the model", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: float = option(10000.0, "base of the rotary frequencies", gt=0)
    rotary_percent: float = option(1.0, "part of a head's channels that is rotated", gt=0, le=1)
    rope_scaling: RopeScaling = RopeScaling()
    window_rotary_base: float | None = option(
        None,
        "base in layers with the window, where positions are not scaled (Gemma 3, OLMo 3); unset: as in the others",
        gt=0,
        needs="window_size",
    )
    window_size: int | None = option(
        None, "sliding window: a token attends to itself and the N - 1 before it; unset: to all before it", ge=1
    )
    window_attn_skip_freq: str | None = option(
        None,
        "layers without the window: N, every N-th; or a list, 1 with it and 0 without: '([1]*3+[0])*2'",
        metavar="N|LIST",
        needs="window_size",
    )
    no_rope_freq: str | None = option(
        None,
        "layers without RoPE (NoPE): N, every N-th; or a list, 1 without and 0 with it: '([0]*3+[1])*2'",
        metavar="N|LIST",
    )
    softmax_scale: float | None = option(None, "factor of attention scores; unset: 1 / sqrt(d)", gt=0)
    softmax_type: str = option(
        "vanilla",
        "attention sinks, a logit in each head's softmax that has no value: off-by-one (0) or learnable (gpt-oss)",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    softmax_type_skip_freq: str | None = option(
        None, "layers without sinks, a pattern as `window_attn_skip_freq` takes", metavar="N|LIST"
    )
    attn_logit_softcapping: float | None = option(
        None, "soft cap c of attention scores, which become c tanh(score / c) (Gemma 2); unset: none", gt=0
    )
    final_logit_softcapping: float | None = option(None, "the same of the output layer's logits", gt=0)
    attn_logit_softcapping_skip_freq: str | None = option(
        None,
        "layers without the soft cap, a pattern as `window_attn_skip_freq` takes",
        metavar="N|LIST",
        needs="attn_logit_softcapping",
    )
    use_parallel_residual: bool = option(
        False, "attention and MLP of a block both read its input and are added together (GPT-NeoX)"
    )
    norm_placement: str = option(
        "pre",
        "norms of a block: of what attention and MLP read (pre), of what they return, before it is added (post, OLMo "
        "2), or of both (sandwich, Gemma 3)",
        choices=("pre", "post", "sandwich"),
    )
    normalization: str = option("LayerNorm", "normalisation layer", choices=("LayerNorm", "RMSNorm"))
    apply_layernorm_1p: bool = option(False, "norms multiply by 1 + weight, and their weights begin at 0 (Gemma)")
    norm_epsilon: float = option(1e-5, "epsilon of the normalisation layers", gt=0)
    activation: str = option(
        "gelu",
        "MLP activation; gelu is exact, gelu-tanh the approximation GPT-2 uses, geglu-tanh Gemma's gate, quick-geglu "
        "that of gpt-oss, x sigmoid(1.702 x)",
        choices=ACTIVATIONS,
    )
    glu_linear_offset: float = option(0.0, "added to the value that the gate of an MLP multiplies (gpt-oss: 1)")
    activation_func_clamp_value: float | None = option(
        None, "the gate of an MLP is at most this, its value between minus this and this (gpt-oss: 7); unset: any", gt=0
    )
    attention_output_gate: bool = option(
        False, "attention's result is multiplied by the sigmoid of a gate of its own, channel by channel"
    )
    latent: Latent = Latent()
    delta: Delta = Delta()
    experts: Experts = Experts()
    further: FurtherTokens = FurtherTokens()
    lora: Lora = Lora()
    mup: Mup = Mup()
    clip: QKClip = QKClip()
    module: ForeignModule = ForeignModule()
    add_bias_linear: bool = option(True, "biases in the linear layers")
    add_qkv_bias: bool = option(False, "a bias in the query/key/value projection even where the others have none")
    qk_layernorm: bool = option(False, "normalise queries and keys of each head before attention")
    qk_layernorm_across_heads: bool = option(
        False, "normalise them over all heads together (OLMoE); RMSNorm only", needs="qk_layernorm"
    )
    embedding_multiplier: float | None = option(
        None,
        "word embeddings times this, rounded to the dtype of the weights (Gemma: sqrt(h)); unset: as they are",
        gt=0,
    )
    untie_embeddings_and_output_weights: bool = option(False, "give the output layer weights of its own")
    hidden_dropout: float = option(0.0, "dropout of embeddings and residual branches", ge=0, lt=1, free=True)
    attention_dropout: float = option(0.0, "dropout of attention weights", ge=0, lt=1, free=True)
    z_loss_coeff: float = option(
        0.0,
        "coefficient of the squared log-sum of the logits in the loss (z-loss; PaLM: 1e-4, OLMo 2: 1e-5); what is "
        "logged is without it",
        ge=0,
        free=True,
    )
    init_method_std: float = option(
        0.02,
        "standard deviation of initial weights; layers that write to the residual stream: / sqrt(2L)",
        ge=0,
        free=True,
    )
    vocab_size: int = option(
        0, "token ids; 0: taken from the tokenizer, which this may only enlarge (NullTokenizer needs it)", ge=0
    )
    make_vocab_size_divisible_by: int = option(
        128, "the vocabulary is padded in memory to a multiple of this times the tensor-parallel size", ge=1, free=True
    )
    fp32_residual_connection: bool = option(False, "keep the residual stream in fp32 (or wider)", free=True)
    attention_softmax_in_fp32: bool = option(
        False, "compute attention scores and softmax in fp32 (or wider)", free=True
    )
    recompute_granularity: str | None = option(
        None,
        "recompute in backward: selective (attention core), full (whole layers), auto (the fewest whole layers with "
        "which `device_memory_budget_gb` is kept) or none; unset: auto under a budget where it is possible, else none",
        choices=("selective", "full", "auto", "none"),
        free=True,
    )
    recompute_method: str | None = option(
        None,
        "for full: uniform (chunks of `recompute_num_layers` layers, each recomputed from its input) or "
        "block (the first `recompute_num_layers` layers of each stage)",
        choices=("uniform", "block"),
        free=True,
    )
    recompute_num_layers: tuple[int, ...] | None = option(
        None,
        "layers of one chunk (uniform) or of a stage (block); for block also one number per stage, first stage first: "
        "4 2 1 0",
        ge=0,
        free=True,
    )
    cpu_offloading_num_layers: int = option(
        0, "first layers of each stage whose activations wait in host memory for their backward", ge=0, free=True
    )

    @property
    def is_foreign(self) -> bool:
        """Whether it is a module of the user's; the sizes above are then stand-ins."""
        return self.module.model_module is not None

    @property
    def gated(self) -> bool:
        """Whether the MLP's first projection has a gate and a value half."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def ffn_size(self) -> int:
        """MLP width f with the default applied."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        # Two thirds keep a gated MLP's three matrices at the parameter count of the plain MLP's two.
        return 4 * self.hidden_size * 2 // 3 // 64 * 64 if self.gated else 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Width of an expert."""
        return self.experts.moe_ffn_hidden_size or self.ffn_size

    @property
    def sparse_layers(self) -> tuple[bool, ...]:
        """Which blocks have experts: with `--moe-layer-freq N` 0, N, 2N, ... (from 0 on). Raises ConfigError."""
        if self.experts.num_experts is None:
            return (False,) * self.num_layers
        pattern = layer_pattern("`moe_layer_freq`", self.experts.moe_layer_freq, self.num_layers)
        layers = range(self.num_layers)
        return tuple(i % pattern == 0 if isinstance(pattern, int) else bool(pattern[i]) for i in layers)

    @property
    def mixer(self) -> str:
        """What lets the tokens of a block see each other: `attention`, `latent` attention, or a state (`delta`)."""
        if self.delta.experimental_attention_variant is not None and self.delta.linear_attention_freq is None:
            return "delta"
        return "latent" if self.latent.multi_latent_attention else "attention"

    @property
    def head_dim(self) -> int:
        """Channels d of a query or key of one attention head."""
        if self.latent.multi_latent_attention:
            return self.latent.qk_channels
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key/value heads g."""
        if self.latent.multi_latent_attention:
            return self.num_attention_heads
        return self.num_query_groups if self.num_query_groups is not None else self.num_attention_heads

    def legal_tensor_size(self, ranks: int) -> bool:
        """Whether so many tensor-parallel ranks can share the heads: each has whole groups of queries with their key
        and value, or several have the queries of one, and as many rows of it."""
        if self.num_attention_heads % ranks:
            return False
        return self.query_groups % ranks == 0 or (ranks % self.query_groups == 0 and self.qkv_size % ranks == 0)

    def local_kv_size(self, ranks: int) -> int:
        """Width of the keys on one of so many tensor-parallel ranks, of which some may have the same."""
        return self.kv_size // min(ranks, self.query_groups)

    @property
    def query_size(self) -> int:
        """Width a*d of all queries together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width g*d of all keys (or all values) together."""
        return self.query_groups * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of queries, their gates, keys and values together."""
        return (2 if self.attention_output_gate else 1) * self.query_size + 2 * self.kv_size

    @property
    def value_size(self) -> int:
        """Width of all heads' results together."""
        width = self.latent.v_head_dim if self.latent.multi_latent_attention else self.head_dim
        return self.num_attention_heads * width

    @property
    def kernel_dim(self) -> int:
        """Channels of a head as kernels see it: those of queries, keys and values are equally many."""
        return max(self.head_dim, self.latent.v_head_dim) if self.latent.multi_latent_attention else self.head_dim

    @property
    def query_multiplier(self) -> float | None:
        """What makes queries of which a score is what it should be, where kernels divide it by `sqrt(kernel_dim)`;
        None: nothing is to be done."""
        scale = usual_scale(self) if self.softmax_scale is None else self.softmax_scale
        if scale is None or math.isclose(scale, self.kernel_dim**-0.5, rel_tol=1e-15):
            return None
        return scale * math.sqrt(self.kernel_dim)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that RoPE rotates (the first ones; of latent attention those beside the others)."""
        if self.latent.multi_latent_attention:
            return self.latent.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary_percent)

    @property
    def max_positions(self) -> int:
        """Longest sequence: rows P of the learned position table; else what is trained on counts too."""
        stated = self.max_position_embeddings or self.seq_length
        return stated if self.position_embedding_type == "learned_absolute" else max(stated, self.seq_length)

    @property
    def text_positions(self) -> int:
        """Longest text: the first rows of a learned position table belong to a prefix."""
        return self.max_positions - self.lora.prefix * (self.position_embedding_type == "learned_absolute")

    @property
    def adapted_parts(self) -> tuple[str, ...]:
        """Parts of linear layers that have an adapter (see `config.lora`)."""
        return self.lora.parts(apart=self.model_type == "llama", sparse=self.experts.num_experts is not None)

    @property
    def shares_embedding(self) -> bool:
        """Whether the head reads the word embedding, too."""
        return not self.untie_embeddings_and_output_weights or self.further.depth > 0

    @property
    def without_adapters(self) -> ModelConfig:
        """The model that adapters are added to."""
        return self if self.lora == Lora() else replace(self, lora=Lora())

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the query/key/value projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def reshapes_softmax(self) -> bool:
        """Whether attention has soft caps or sinks, which tiles alone compute."""
        return self.attn_logit_softcapping is not None or self.softmax_type != "vanilla"

    def has_window(self, index: int) -> bool:
        """Whether block `index` has the window. `--window-attn-skip-freq N` leaves out layers N, 2N, ... (from 1 on).
        ConfigError for a malformed pattern, as of the next ones."""
        return self.window_size is not None and self.listed("window_attn_skip_freq", index)

    def has_rope(self, index: int) -> bool:
        """Whether block `index` rotates queries and keys. `--no-rope-freq N` leaves out layers N, 2N, ... (from 1)."""
        return self.position_embedding_type == "rope" and not self.listed("no_rope_freq", index)

    def listed(self, field: str, index: int) -> bool:
        """Whether the list that one of `LAYER_PATTERNS` is, or stands for, has a 1 for block `index`."""
        text = self.delta.linear_attention_freq if field == "linear_attention_freq" else getattr(self, field)
        if text is None:
            return field in SKIPPED
        pattern = layer_pattern(f"`{field}`", text, self.num_layers)
        if isinstance(pattern, int):  # N: the lists of SKIPPED say what is kept
            return bool((index + 1) % pattern) == (field in SKIPPED)
        return bool(pattern[index])

    def for_layer(self, index: int) -> ModelConfig:
        """What block `index` is built with: its window, its sinks, its soft cap, its rotation."""
        patterns: dict[str, Any] = dict.fromkeys((*OWN_PATTERNS, "window_rotary_base"))
        if self.delta.linear_attention_freq is not None:
            linear = self.listed("linear_attention_freq", index)
            patterns["delta"] = replace(self.delta, linear_attention_freq=None) if linear else Delta()
        elif all(getattr(self, name) is None for name in patterns):
            return self
        if self.window_rotary_base is not None and self.has_window(index):
            patterns |= {"rotary_base": self.window_rotary_base, "rope_scaling": RopeScaling()}
        for pattern, (name, off) in WITHOUT.items():
            if getattr(self, name) != off and not self.listed(pattern, index):
                patterns[name] = off
        if self.position_embedding_type == "rope" and not self.has_rope(index):
            patterns["position_embedding_type"] = "none"
        return replace(self, **patterns)

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the embedding in memory: the vocabulary rounded up to the divisor times the tensor-parallel size."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple
