"""Parts of the model section: RoPE, latent and linear attention, experts, further tokens, QK-clip, a foreign module."""

import math

from megalite.config.schema import Spelled, option


class RopeScaling(Spelled, flag="rope_scaling", only_with="use_rope_scaling"):
    """scaling of RoPE, to read further than it was trained"""

    rotary_seq_len_interpolation_factor: float = option(
        1.0, "positions are divided by it before rotation (linear scaling)", ge=1, flag=None, only_with=None
    )
    use_rope_scaling: bool = option(False, "scale the rotary frequencies", switch="rope_scaling")
    rope_scaling_type: str = option(
        "llama3", "llama3 (Llama 3.1) or yarn (YaRN, with its logits' temperature)", choices=("llama3", "yarn")
    )
    rope_scaling_factor: float = option(8.0, "factor for the low frequencies", ge=1)
    rope_scaling_original_length: int = option(8192, "sequence length of the training before it", ge=1)
    yarn_beta_fast: float = option(
        32.0, "YaRN: channels that turn more often in that length are kept", gt=0, arg="beta_fast"
    )
    yarn_beta_slow: float = option(1.0, "YaRN: those that turn less often are slowed down fully", gt=0, arg="beta_slow")
    yarn_correction_range_round_to_int: bool = option(True, "YaRN: blend between whole channels", arg="round_to_int")
    mscale: float | None = option(
        None,
        "YaRN: temperature (0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1); unset: 0.1 ln factor + 1",
        gt=0,
        needs="mscale_all_dim",
        only_with=None,
    )
    mscale_all_dim: float | None = option(None, "YaRN: see mscale", gt=0, needs="mscale", only_with=None)

    @property
    def kind(self) -> str | None:
        """How frequencies are scaled, None: not."""
        return self.rope_scaling_type if self.use_rope_scaling else None

    @property
    def yarn_temperature(self) -> float:
        """What YaRN multiplies cosines and sines by."""
        log = 0.1 * math.log(self.rope_scaling_factor)
        if self.mscale is None or self.mscale_all_dim is None:
            return log + 1.0
        return (log * self.mscale + 1.0) / (log * self.mscale_all_dim + 1.0)

    @property
    def latent_temperature(self) -> float:
        """What latent attention multiplies queries and keys by beside it."""
        if self.kind != "yarn" or self.mscale_all_dim is None:
            return 1.0
        return 0.1 * math.log(self.rope_scaling_factor) * self.mscale_all_dim + 1.0


class Latent(Spelled, flag="mla", prefix="latent_", needs="multi_latent_attention"):
    """latent attention: keys and values of all heads are made of one small vector a token

    MLA (DeepSeek-V2, arXiv 2405.04434): the vector is all that generation keeps. Without the switch attention has keys
    and values of its own.
    """

    multi_latent_attention: bool = option(False, "latent attention (MLA) in place of grouped queries", switch="mla")
    q_lora_rank: int | None = option(
        None, "width of the vector that queries are made of; unset: of the block's input", ge=1
    )
    kv_lora_rank: int = option(32, "width of the vector that keys and values are made of", ge=1)
    qk_head_dim: int = option(128, "channels of a head's queries and keys without position", ge=1)
    qk_pos_emb_head_dim: int = option(64, "further ones that RoPE rotates; their keys are the same for all heads", ge=2)
    v_head_dim: int = option(128, "channels of a head's values", ge=1)
    latent_norm_epsilon: float | None = option(
        None, "epsilon of the norms of the two vectors; unset: `norm_epsilon`", gt=0
    )

    @property
    def qk_channels(self) -> int:
        """Channels of a query or key of one head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def compressed(self) -> int:
        """Numbers of a token that its keys and values follow from, the rotated part of its keys included."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim


class Delta(Spelled, flag="linear_attention", prefix="linear_", needs="experimental_attention_variant"):
    """layers whose tokens meet in a state: Gated DeltaNet

    Yang et al., arXiv 2412.06464.
    """

    experimental_attention_variant: str | None = option(
        None, "gdn: Gated DeltaNet in place of attention", choices=("gdn",), arg="variant"
    )
    linear_attention_freq: str | None = option(
        None,
        "layers that keep attention: N, every N-th; or a list, 1 without and 0 with it: '([1]*3+[0])*2'; unset: none",
        metavar="N|LIST",
        arg="freq",
    )
    linear_key_head_dim: int = option(128, "channels of a head's queries and keys", ge=1)
    linear_value_head_dim: int = option(128, "channels of a head's values", ge=1)
    linear_num_key_heads: int = option(16, "heads of queries and keys", ge=1)
    linear_num_value_heads: int = option(32, "heads of values, a multiple of those", ge=1)
    linear_conv_kernel_dim: int = option(4, "tokens that the convolution before it looks at", ge=1, le=64)

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def mixed(self) -> int:
        """Channels of a key head that the convolution mixes: query, key, values."""
        return 2 * self.linear_key_head_dim + self.group * self.linear_value_head_dim

    @property
    def value_size(self) -> int:
        """Width of all values together."""
        return self.linear_num_value_heads * self.linear_value_head_dim


class Experts(Spelled, needs="num_experts"):
    """Experts, and the router that sends tokens to them. A block's MLP is E experts, of which each token takes k;
    without `--num-experts` every block is dense."""

    num_experts: int | None = option(None, "experts E of a sparse block; unset: all blocks are dense", ge=2, le=4096)
    moe_router_topk: int = option(2, "experts k of a token", ge=1)
    moe_ffn_hidden_size: int | None = option(None, "width of an expert; unset: that of the dense MLP", ge=1)
    moe_layer_freq: str = option(
        "1", "which blocks are sparse: N, every Nth from the first on, or a list such as [0]*3+[1]*29"
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None, "width of an MLP beside the experts that all tokens take; unset: none", ge=1
    )
    moe_shared_expert_gate: bool = option(
        False,
        "what that MLP makes is multiplied by the sigmoid of a number of the token (Qwen3-Next)",
        needs="moe_shared_expert_intermediate_size",
    )
    moe_router_load_balancing_type: str = option(
        "aux_loss",
        "what the auxiliary loss balances: the tokens of a micro-batch (aux_loss), of each sequence (seq_aux_loss), "
        "or nothing (none)",
        choices=("aux_loss", "seq_aux_loss", "none"),
        free=True,
    )
    moe_aux_loss_coeff: float = option(0.0, "coefficient of the auxiliary loss", ge=0, free=True)
    moe_z_loss_coeff: float = option(
        0.0, "coefficient of the z-loss, the mean squared log-sum of the router's logits", ge=0, free=True
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "in training an expert takes at most this times k s / E tokens of a sequence, the first ones; unset: all",
        gt=0,
        free=True,
    )
    moe_router_score_function: str = option("softmax", "of the router's logits", choices=("softmax", "sigmoid"))
    moe_router_pre_softmax: bool = option(
        False, "softmax over all experts and then the k largest, not over the k largest alone"
    )
    moe_router_num_groups: int | None = option(None, "groups of experts, of which a token takes some", ge=1)
    moe_router_group_topk: int | None = option(
        None, "groups of `moe_router_num_groups` that a token takes its experts from", ge=1
    )
    moe_router_topk_scaling_factor: float | None = option(
        None, "the weights of a token's experts are multiplied by it", gt=0
    )
    moe_router_bias: bool = option(False, "a bias in the router's logits (gpt-oss)")
    moe_router_enable_expert_bias: bool = option(
        False, "a bias of each expert helps to choose, and every update moves it towards even loads"
    )
    moe_router_bias_update_rate: float = option(
        1e-3, "how far an update moves the bias of an expert", ge=0, needs="moe_router_enable_expert_bias", free=True
    )

    @property
    def balances(self) -> bool:
        """Whether there is an auxiliary loss."""
        return self.moe_router_load_balancing_type != "none" and self.moe_aux_loss_coeff > 0


class FurtherTokens(Spelled, flag="mtp"):
    """multi-token prediction: tokens beyond the next one

    DeepSeek-V3 (arXiv 2412.19437, 2.2): behind the last block further ones, each of which predicts one token further.
    """

    mtp_num_layers: int | None = option(
        None, "tokens beyond the next that are predicted, each by a block of its own; unset: none", ge=1, le=16
    )
    mtp_loss_scaling_factor: float = option(
        0.1, "weight of the mean of their losses beside that of the next token", ge=0, needs="mtp_num_layers", free=True
    )

    @property
    def depth(self) -> int:
        """How many, 0 without."""
        return self.mtp_num_layers or 0


class QKClip(Spelled, flag="qk_clip", only_with="qk_clip", free=True):
    """scores of attention, bounded by scaling the projections of queries and keys after an update"""

    qk_clip: bool = option(
        False,
        "after each update scale the projections of queries and keys whose largest score was above a threshold",
        switch="qk_clip",
    )
    qk_clip_threshold: float = option(100.0, "the largest score that stays as it is", gt=0)
    qk_clip_alpha: float = option(
        0.5, "share of the factor, as its exponent, that queries take; keys take the rest", ge=0, le=1
    )


KINDS = ("col", "row", "vocab")


class ForeignModule(Spelled):
    """A model of your own in place of gpt and llama. Its sizes, names and initial values are its own."""

    model_module: str | None = option(
        None,
        "train a module of your own (docs/library.md): package.module:factory, or my_model.py:factory; the function is "
        "called with vocab_size and seq_length where it takes them; one that reads later tokens is refused (asked "
        "before the first step, of modules up to 67 M parameters and 10^10 parameters times tokens of a micro-batch)",
        metavar="MODULE:FACTORY",
    )
    tensor_parallel_globs: tuple[str, ...] = option(
        (),
        "its linear layers that tensor-parallel ranks share, by name: col:*.up_proj row:*.down_proj vocab:lm_head",
        metavar="KIND:GLOB",
        needs="model_module",
        free=True,
    )

    @property
    def table(self) -> dict[str, list[str]]:
        """Kind -> globs of names. ValueError for an item that is neither."""
        found: dict[str, list[str]] = {}
        for item in self.tensor_parallel_globs:
            kind, colon, glob = item.partition(":")
            if kind not in KINDS or not glob:
                raise ValueError(item)
            found.setdefault(kind, []).append(glob)
        return found


OF_MODULES = (
    "model_module",
    "tensor_parallel_globs",
    "seq_length",
    "vocab_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "cpu_offloading_num_layers",
)
"""What of the model section says something about a module of the user's."""
