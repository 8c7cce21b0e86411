"""Rules of mixture of experts: the router's numbers, what experts are cut into, and what does not go together yet."""

from collections.abc import Iterator

from megalite.config.root import Config
from megalite.config.rules.text import EP, ETP, TP, divisors, listed, multiples_around
from megalite.config.values import show
from megalite.errors import ConfigError

DISPATCHER = "`moe_token_dispatcher_type`"


def experts(config: Config, world_size: int) -> Iterator[str]:
    """What the model's own numbers must fit."""
    given = config.model.experts
    number, k = config.given["num_experts"], given.moe_router_topk
    try:
        if not any(config.model.sparse_layers):
            yield f"`moe_layer_freq`={given.moe_layer_freq}: no block is sparse; drop `num_experts`"
    except ConfigError as error:
        yield error.text
    if k > number:
        yield f"`moe_router_topk`={k}: more than `num_experts`={number}"
    if k == 1 and given.moe_router_score_function == "softmax" and not given.moe_router_pre_softmax:
        yield (
            "`moe_router_topk`=1: the softmax of one score is 1, so the router would learn nothing; add "
            "`moe_router_pre_softmax`"
        )
    if given.moe_router_enable_expert_bias and given.moe_router_score_function != "sigmoid":
        yield "`moe_router_enable_expert_bias`: needs `moe_router_score_function`=sigmoid"
    if given.moe_router_load_balancing_type == "none" and given.moe_aux_loss_coeff > 0:
        coefficient = show(given.moe_aux_loss_coeff)
        yield f"`moe_aux_loss_coeff`={coefficient}: not with `moe_router_load_balancing_type`=none; drop one of them"
    groups, chosen = given.moe_router_num_groups, given.moe_router_group_topk
    if groups is None and chosen is not None:
        yield f"`moe_router_group_topk`={chosen}: needs `moe_router_num_groups`"
    elif groups is not None and chosen is None:
        yield f"`moe_router_num_groups`={groups}: needs `moe_router_group_topk`"
    elif groups is not None and chosen is not None:
        flag = f"`moe_router_num_groups`={groups}"
        if number % groups:
            yield f"{flag}: does not divide `num_experts`={number}; legal: {listed(divisors(number))}"
        elif chosen > groups:
            yield f"`moe_router_group_topk`={chosen}: more than {flag}"
        elif k > (have := chosen * number // groups):
            yield f"`moe_router_topk`={k}: `moe_router_group_topk`={chosen} groups have {have} experts"


def expert_parallel(config: Config, world_size: int) -> Iterator[str]:
    """What the axes of experts must divide."""
    given, parallel = config.model.experts, config.parallel
    axes, tp = parallel.experts, parallel.tensor_model_parallel_size
    ep, etp, number = axes.expert_model_parallel_size, parallel.expert_tensor_size, given.num_experts
    if number is None:
        given_of = {EP: ep, ETP: axes.expert_tensor_parallel_size, DISPATCHER: axes.moe_token_dispatcher_type}
        for flag, value in given_of.items():
            if value not in (None, 1, "alltoall"):
                yield f"{flag}={value}: needs `num_experts`"
        return
    flex, precision = axes.moe_token_dispatcher_type == "flex", config.training.precision.name
    if flex and ep == 1:
        yield f"{DISPATCHER}=flex: carries tokens to other ranks, and {EP} is 1; give that, or drop this"
    if flex and precision != "bf16" and parallel.hardware.device != "cpu":  # there a stand-in of tests takes any dtype
        yield f"{DISPATCHER}=flex: DeepEP carries bf16, and the run is in {precision}; add `bf16`, or drop it"
    stage = world_size // parallel.pipeline_model_parallel_size
    if number % ep:
        legal = [size for size in divisors(number) if stage % (etp * size) == 0]
        yield f"{EP}={ep}: does not divide `num_experts`={number}; legal: {listed(legal or [1])}"
    if etp not in (1, tp):
        yield f"{ETP}={etp}: must be 1 or {TP}={tp}"
    elif etp < tp and not parallel.sequence_parallel:
        yield (
            f"{ETP}={etp}: with {TP}={tp} each rank must have tokens of its own; add `sequence_parallel`, or {ETP}={tp}"
        )
    if world_size % parallel.model_parallel_size == 0 and stage % (etp * ep):
        yield (
            f"{EP}={ep}: the {stage} ranks of a pipeline stage cannot be dealt out to {ETP}={etp} x {EP}={ep} = "
            f"{etp * ep}; use {multiples_around(stage, etp * ep)} ranks a stage, or a smaller {EP}"
        )
    elif stage // max(1, etp * ep) % parallel.num_distributed_optimizer_instances:
        instances = parallel.num_distributed_optimizer_instances
        yield (
            f"`num_distributed_optimizer_instances`={instances}: must divide the {stage // (etp * ep)} ranks that hold "
            "the same experts"
        )
    width = config.model.expert_ffn_size
    if width % etp:
        yield f"{ETP}={etp}: does not divide `moe_ffn_hidden_size`={width}; try {multiples_around(width, etp)}"
    shared = given.moe_shared_expert_intermediate_size
    if shared is not None and shared % tp:
        yield f"{TP}={tp}: does not divide `moe_shared_expert_intermediate_size`={shared}"
