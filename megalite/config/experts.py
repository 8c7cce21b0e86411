"""Mixture of experts in the model section: blocks whose MLP is E experts, of which each token takes k."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import Spelled, option

BALANCING = ("aux_loss", "seq_aux_loss", "none")
SCORE_FUNCTIONS = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class Experts(Spelled):
    """Experts, and the router that sends tokens to them. Without `--num-experts` every block is dense."""

    num_experts: int | None = option(None, "experts E of a sparse block; unset: all blocks are dense", ge=2, le=4096)
    moe_router_topk: int = option(2, "experts k of a token", ge=1, needs="num_experts")
    moe_ffn_hidden_size: int | None = option(
        None, "width of an expert; unset: that of the dense MLP", ge=1, needs="num_experts"
    )
    moe_layer_freq: str = option(
        "1",
        "which blocks are sparse: N, every Nth from the first on, or a list such as [0]*3+[1]*29",
        needs="num_experts",
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None, "width of an MLP beside the experts that all tokens take; unset: none", ge=1, needs="num_experts"
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
        choices=BALANCING,
        needs="num_experts",
    )
    moe_aux_loss_coeff: float = option(0.0, "coefficient of the auxiliary loss", ge=0, needs="num_experts")
    moe_z_loss_coeff: float = option(
        0.0, "coefficient of the z-loss, the mean squared log-sum of the router's logits", ge=0, needs="num_experts"
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "in training an expert takes at most this times k s / E tokens of a sequence, the first ones; unset: all",
        gt=0,
        needs="num_experts",
    )
    moe_router_score_function: str = option(
        "softmax", "of the router's logits", choices=SCORE_FUNCTIONS, needs="num_experts"
    )
    moe_router_pre_softmax: bool = option(
        False, "softmax over all experts and then the k largest, not over the k largest alone", needs="num_experts"
    )
    moe_router_num_groups: int | None = option(
        None, "groups of experts, of which a token takes some", ge=1, needs="num_experts"
    )
    moe_router_group_topk: int | None = option(
        None, "groups of `moe_router_num_groups` that a token takes its experts from", ge=1, needs="num_experts"
    )
    moe_router_topk_scaling_factor: float | None = option(
        None, "the weights of a token's experts are multiplied by it", gt=0, needs="num_experts"
    )
    moe_router_bias: bool = option(False, "a bias in the router's logits (gpt-oss)", needs="num_experts")
    moe_router_enable_expert_bias: bool = option(
        False,
        "a bias of each expert helps to choose, and every update moves it towards even loads",
        needs="num_experts",
    )
    moe_router_bias_update_rate: float = option(
        1e-3, "how far an update moves the bias of an expert", ge=0, needs="moe_router_enable_expert_bias"
    )

    @property
    def balances(self) -> bool:
        """Whether there is an auxiliary loss."""
        return self.moe_router_load_balancing_type != "none" and self.moe_aux_loss_coeff > 0
