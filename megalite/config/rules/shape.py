"""Rules of the model's shape and of recomputation."""

from collections.abc import Iterator

from megalite.config.layer_pattern import layer_pattern
from megalite.config.model import LAYER_PATTERNS, SKIPPED, ModelConfig
from megalite.config.root import Config
from megalite.config.rules.text import PP, divisors, listed, multiples_around
from megalite.config.schema import flat
from megalite.config.values import show
from megalite.errors import ConfigError


def model_shape(config: Config, world_size: int) -> Iterator[str]:
    model = config.model
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.query_groups
    if model.kv_channels is None and hidden % heads and model.mixer == "attention":
        near = multiples_around(hidden, heads)
        yield f"`hidden_size`={hidden}: not divisible by `num_attention_heads`={heads}; try {near}"
    if heads % groups:
        legal = listed(divisors(heads))
        yield f"`num_query_groups`={groups}: must divide `num_attention_heads`={heads}; legal: {legal}"
    if model.position_embedding_type == "learned_absolute" and model.seq_length > model.max_positions:
        yield (
            f"`seq_length`={model.seq_length}: exceeds `max_position_embeddings`={model.max_positions} "
            "(learned positions); raise it or use `position_embedding_type` rope"
        )
    rotated = model.position_embedding_type == "rope" and model.mixer == "attention"
    if rotated and (model.rotary_dim % 2 or model.rotary_dim == 0):
        yield (
            f"`rotary_percent`={show(model.rotary_percent)}: rotates {model.rotary_dim} of a head's {model.head_dim} "
            "channels (`hidden_size` / `num_attention_heads`); RoPE needs an even number above 0"
        )
    if model.ffn_size < 1:
        yield (
            f"`hidden_size`={hidden}: the default MLP width of `activation`={model.activation} would be 0; "
            "give `ffn_hidden_size`"
        )
    for name in ("glu_linear_offset", "activation_func_clamp_value"):
        if not model.gated and (value := getattr(model, name)):
            yield f"`{name}`={show(value)}: `activation`={model.activation} has no gate; use one such as quick-geglu"
    if model.qk_layernorm_across_heads and model.normalization != "RMSNorm":
        yield f"`qk_layernorm_across_heads`: not with `normalization`={model.normalization}; use RMSNorm"
    fast, slow = model.rope_scaling.yarn_beta_fast, model.rope_scaling.yarn_beta_slow
    if model.rope_scaling.kind == "yarn" and fast <= slow:
        yield f"`yarn_beta_fast`={show(fast)}: not above `yarn_beta_slow`={show(slow)}; the paper has 32 and 1"
    if model.window_rotary_base is not None and model.window_size is not None and model.window_attn_skip_freq is None:
        base = show(model.window_rotary_base)
        yield f"`window_rotary_base`={base}: every layer has the window; give `rotary_base`, or `window_attn_skip_freq`"
    yield from _latent(model)
    yield from _delta(config)
    yield from _further(model)
    yield from _layer_patterns(model)


def _latent(model: ModelConfig) -> Iterator[str]:
    """What latent attention has no place for."""
    if model.mixer != "latent":
        return
    flag, groups = "`multi_latent_attention`", model.num_query_groups
    if groups not in (None, model.num_attention_heads):
        yield f"`num_query_groups`={groups}: not with {flag}, where each head has keys of its own; drop it"
    if model.qk_layernorm_across_heads:
        yield f"`qk_layernorm_across_heads`: not with {flag}; `qk_layernorm` normalises what heads are made of"
    if model.add_qkv_bias:
        yield f"`add_qkv_bias`: not with {flag}, whose queries and keys have no bias; drop it"
    if model.rotary_percent != 1:
        yield f"`rotary_percent`={show(model.rotary_percent)}: not with {flag}; `qk_pos_emb_head_dim` are rotated"
    if model.lora.lora_rank is not None:
        yield f"`lora_rank`={model.lora.lora_rank}: not with {flag}, whose matrices have no adapters; train it whole"
    if model.latent.qk_pos_emb_head_dim % 2:
        yield f"`qk_pos_emb_head_dim`={model.latent.qk_pos_emb_head_dim}: RoPE needs an even number"
    if model.latent.latent_norm_epsilon is not None and not model.qk_layernorm:
        yield "`latent_norm_epsilon`: needs `qk_layernorm`"


def _delta(config: Config) -> Iterator[str]:
    """Heads of a state, and what cuts them."""
    parallel, given = config.parallel, config.model.delta
    if given.experimental_attention_variant is None:
        return
    keys, values = given.linear_num_key_heads, given.linear_num_value_heads
    sizes = {mesh.tp for mesh in parallel.meshes} or {parallel.tensor_model_parallel_size}
    if values % keys:
        yield f"`linear_num_value_heads`={values}: must be a multiple of `linear_num_key_heads`={keys}"
    for ranks in sorted(size for size in sizes if keys % size):
        yield (
            f"`linear_num_key_heads`={keys}: {ranks} tensor-parallel ranks cannot share them; legal: "
            f"{listed(divisors(keys))}"
        )


def _further(model: ModelConfig) -> Iterator[str]:
    """What multi-token prediction does not go together with."""
    depth = model.further.depth
    flag = f"`mtp_num_layers`={depth}"
    if depth and model.position_embedding_type == "learned_absolute":
        yield f"{flag}: not with learned positions; use `position_embedding_type` rope"
    if depth and model.seq_length <= depth:
        yield f"{flag}: a sample has `seq_length`={model.seq_length} tokens; predict fewer"


def _layer_patterns(model: ModelConfig) -> Iterator[str]:
    """Lists of layers that are none, or that leave nothing of what they speak of."""
    values, layers = flat(model), model.num_layers
    for field in (field for field in LAYER_PATTERNS if values[field] is not None):
        flag = f"`{field}`={values[field]}"
        try:
            pattern = layer_pattern(f"`{field}`", values[field], layers)
        except ConfigError as error:
            yield error.text
            continue
        if field == "no_rope_freq":
            if isinstance(pattern, int) and layers % pattern:
                near = multiples_around(layers, pattern)
                yield f"`{field}`={pattern}: does not divide `num_layers`={layers}; give a list, or {near} layers"
            if model.position_embedding_type != "rope":
                yield f"{flag}: needs `position_embedding_type`=rope"
        elif (value := values[SKIPPED[field]]) == "vanilla":
            yield f"{flag}: needs `softmax_type`=off-by-one or learnable"
        elif value is not None and (pattern == 1 or not any(pattern if isinstance(pattern, tuple) else (1,))):
            yield f"{flag}: leaves no layer with `{SKIPPED[field]}`={show(value)}; drop both"


def recompute(config: Config, world_size: int) -> Iterator[str]:
    model = config.model
    if model.recompute_granularity != "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if name in config.given:
                yield f"`{name}`={show(config.given[name])}: needs `recompute_granularity`=full"
    elif model.recompute_num_layers is not None:
        yield from _recomputed_layers(config, model.recompute_num_layers)
    budget = config.parallel.hardware.device_memory_budget_gb
    if model.recompute_granularity in ("auto", "none") and budget is None:
        yield f"`recompute_granularity`={model.recompute_granularity}: needs `device_memory_budget_gb`; leave it out"
    offloaded = model.cpu_offloading_num_layers
    if offloaded > model.num_layers:
        yield f"`cpu_offloading_num_layers`={offloaded}: more than `num_layers`={model.num_layers}"
    elif offloaded and model.recompute_granularity == "full":
        yield (
            f"`cpu_offloading_num_layers`={offloaded}: not with `recompute_granularity`=full, which keeps nothing of a "
            "layer to offload; give one of them"
        )


def _recomputed_layers(config: Config, numbers: tuple[int, ...]) -> Iterator[str]:
    """One number for all stages, or under the block method one for each."""
    model, parallel = config.model, config.parallel
    flag, block = f"`recompute_num_layers`={show(numbers)}", model.recompute_method == "block"
    if len(numbers) > 1 and not block:
        yield f"{flag}: one number for each stage needs `recompute_method`=block; give that, or one number"
    elif len(numbers) > 1 and parallel.pipeline_schedule_file is not None:
        yield f"{flag}: not with `pipeline_schedule_file`; give one number for all stages"
    elif len(numbers) > 1 and len(numbers) != (stages := parallel.pipeline_model_parallel_size * parallel.num_chunks):
        ranks = f"{PP}={parallel.pipeline_model_parallel_size} x {parallel.num_chunks} chunks per rank"
        yield f"{flag}: {len(numbers)} numbers for {stages} stages ({ranks}); give {stages}, or one for all"
    elif max(numbers) > model.num_layers:
        yield f"{flag}: more than `num_layers`={model.num_layers}"
    elif not any(numbers):
        yield f"{flag}: recomputes nothing; leave out `recompute_granularity`=full"
