"""What a model consists of, layer by layer, without a tensor: parameters, matrix products, sums over the tensor axis.

A model is the list [embedding, block 0, ..., block L-1, head]. Everything that counts or cuts it reads this list:
parameter counts and FLOPs, memory, the cuts of a pipeline, conversion, the planner. `nn` builds the same from the
configuration (tests/unit/inventory holds the two together over every family and flag).

Layers may differ; those with the same description are one object, so whatever is worked out of a layer is found again
by it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megalite.config import Experts, ModelConfig, ParallelConfig
from megalite.errors import ConfigError
from megalite.inventory.adapters import bottlenecks, with_adapters
from megalite.inventory.mixers import MIXERS
from megalite.inventory.parameter import Parameter
from megalite.inventory.parameter_placement import Shape
from megalite.inventory.pieces import Product, experts, mlp, norm, router, whole

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"

FLOPS_CONVENTION = "model FLOPs, Megatron's convention: causal attention halved, no recomputation"


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer. model: the configuration as this layer has it.

    gathers: inputs of width h that each tensor-parallel rank needs whole (`f` of Megatron-LM: gathered under sequence
    parallelism, their gradients summed). sums: outputs that are summed over the axis (`g`: scattered under sequence
    parallelism, their gradients gathered).
    """

    kind: str
    model: ModelConfig
    parameters: tuple[Parameter, ...]
    products: tuple[Product, ...] = ()
    gathers: float = 0
    sums: int = 0

    @property
    def is_block(self) -> bool:
        return self.kind == "block"

    @property
    def is_sparse(self) -> bool:
        """A block with experts."""
        return self.is_block and self.model.experts.num_experts is not None

    @property
    def is_frozen(self) -> bool:
        """Whether nothing but adapters is trained."""
        return any(p.frozen for p in self.parameters)

    def met(self, parameter: Parameter) -> int:
        """Elements of one of its parameters that a token meets: of experts, those that it takes."""
        given, numel = self.model.experts, parameter.numel
        return numel * given.moe_router_topk // (given.num_experts or 1) if parameter.dealt else numel

    def mlp_width(self, parallel: ParallelConfig, imbalance: float = 1.0) -> float:
        """Numbers of a token between the two matrices of the MLP, or of all experts that it takes, on one rank.
        imbalance: rows of the rank's experts, as a multiple of the mean of those that share them."""
        tp, width = parallel.tensor_model_parallel_size, 0.0
        for p in self.products:
            if p.name.endswith("fc1"):
                shards = p.shards(parallel)
                width += p.local(shards)[0] * (imbalance * shards / tp if p.name.startswith("experts.") else 1)
        return width

    def in_float8(self) -> list[Product]:
        """Those that `--fp8-format` rounds: not of the router and the experts."""
        rounded = [p for p in self.products if not (p.core or p.name == "router" or p.name.startswith("experts."))]
        return rounded if self.kind == "block" else []

    def product(self, name: str) -> Product:
        return next(product for product in self.products if product.name == name)

    def flops(self, shards: int | None = None, *, core: bool | None = None) -> int:
        """Of one token forward; core: only of attention's core, or only of the rest."""
        return sum(p.flops(shards) for p in self.products if core is None or p.core == core)


def vocabulary(name: str, model: ModelConfig, copy_of: str | None = None) -> Parameter:
    """The vectors of all tokens; each rank's rows are padded."""
    shape, multiple = (model.vocab_size, model.hidden_size), model.make_vocab_size_divisible_by
    return Parameter(name, shape, 0, multiple, init_std=model.init_method_std, copy_of=copy_of)


def _embedding(model: ModelConfig) -> Layer:
    parameters = [vocabulary("word_embeddings.weight", model)]
    if model.position_embedding_type == "learned_absolute":
        shape = (model.max_positions, model.hidden_size)
        parameters.append(
            Parameter("position_embeddings.weight", shape, partial="sequence", init_std=model.init_method_std)
        )
    return Layer("embedding", model, tuple(with_adapters(parameters, model)), sums=1)


@lru_cache(maxsize=256)
def _block(model: ModelConfig) -> Layer:
    h, before, behind = model.hidden_size, model.norm_placement != "post", model.norm_placement != "pre"
    mixing = MIXERS[model.mixer]
    mixer, mixer_products = mixing.contents(model)
    mlp, mlp_products = _experts(model) if model.experts.num_experts is not None else _mlp("mlp", model, model.ffn_size)
    parameters = [
        *(norm("input_norm", h, model) if before else []),
        *mixer,
        *(norm("post_attention_norm", h, model) if behind else []),
        *(norm("mlp_norm", h, model) if before else []),
        *mlp,
        *(norm("post_mlp_norm", h, model) if behind else []),
        *bottlenecks(model),
    ]
    products = (*mixer_products, *mlp_products)
    return Layer(
        "block",
        model,
        tuple(with_adapters(parameters, model)),
        products,
        gathers=1 + mixing.entering(model) / h,
        sums=2,
    )


def _mlp(name: str, model: ModelConfig, f: int) -> tuple[list[Parameter], list[Product]]:
    """Up and down, `name` inside of the block."""
    (up, *_), _ = parameters = mlp(name, f, model)
    inside, h = name.removeprefix("mlp").lstrip("."), model.hidden_size
    label = f"{inside}." if inside else ""
    products = [Product(f"{label}fc1", up.numel // h, h, "n"), Product(f"{label}fc2", h, f, "k")]
    return sum(parameters, []), products


def _experts(model: ModelConfig) -> tuple[list[Parameter], list[Product]]:
    """The router, all experts in stacked matrices, and the MLP beside them, if there is one."""
    given, h, f = model.experts, model.hidden_size, model.expert_ffn_size
    number, k, up = given.num_experts or 1, given.moe_router_topk, 2 * f if model.gated else f
    products = [
        Product("router", number, h, ""),
        Product("experts.fc1", k * up, h, "n"),
        Product("experts.fc2", h, k * f, "k"),
    ]
    shared = given.moe_shared_expert_intermediate_size
    beside = ([], []) if shared is None else _mlp("mlp.shared_experts", model, shared)
    if given.moe_shared_expert_gate:
        beside = ([*beside[0], whole("mlp.shared_gate", 1, h, model)], beside[1])
    return [*router(model), *sum(experts(model), []), *beside[0]], [*products, *beside[1]]


def _head(model: ModelConfig) -> Layer:
    tied = None if model.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
    h, further = model.hidden_size, model.further.depth
    parameters = [*norm("final_norm", h, model), vocabulary("output.weight", model, tied)]
    if further and tied is None:
        parameters.append(vocabulary("mtp.word_embeddings.weight", model, WORD_EMBEDDINGS))
    output = Product("output", model.vocab_size, h, "n", model.make_vocab_size_divisible_by)
    products, block = [output], _block(block_models(model)[-1])
    for k in range(further):
        own = f"mtp.layers.{k}"
        parameters += [
            *norm(f"{own}.e_norm", h, model),
            *norm(f"{own}.h_norm", h, model),
            whole(f"{own}.proj", h, 2 * h, model),
            *(replace(p, name=f"{own}.block.{p.name}") for p in block.parameters),
            *norm(f"{own}.norm", h, model),
        ]
        products += [Product(f"{own}.proj", h, 2 * h, ""), *block.products, replace(output, name=f"{own}.output")]
    return Layer(
        "head", model, tuple(with_adapters(parameters, model)), tuple(products), gathers=1 + further, sums=further
    )


def block_models(model: ModelConfig) -> Sequence[ModelConfig]:
    """The configuration as each block has it: the place where blocks begin to differ."""
    dense = replace(model, experts=Experts())
    return [(model if sparse else dense).for_layer(i) for i, sparse in enumerate(model.sparse_layers)]


@lru_cache(maxsize=256)
def model_layers(model: ModelConfig) -> tuple[Layer, ...]:
    """[embedding, block 0, ..., head]. The vocabulary must be known (it comes from the tokenizer). Raises ConfigError
    for a module of the user's own."""
    if model.is_foreign:
        raise ConfigError(
            f"`model_module`={model.module.model_module}: its layers are known where it is trained, by pretrain_gpt.py "
            "(`dry_run` shows them); this needs one of megalite's own models"
        )
    assert model.vocab_size > 0, "the vocabulary size comes from the tokenizer: resolve it first"
    return (_embedding(model), *map(_block, block_models(model)), _head(model))


def blocks_of(model: ModelConfig, items: range) -> range:
    """The blocks among consecutive items of the list."""
    return range(max(items.start, 1), max(1, min(items.stop, model.num_layers + 1)))


@lru_cache(maxsize=4096)
def first_alike(model: ModelConfig, items: range) -> range:
    """The first stretch of the list with the same layers as `items`: what is counted of one holds for the other."""
    all_layers = model_layers(model)
    wanted, length = all_layers[items.start : items.stop], len(items)
    return next(range(i, i + length) for i in range(items.stop) if all_layers[i : i + length] == wanted)


def layer_name(index: int, num_layers: int) -> str:
    """Of item `index` of the list: 'embedding', 'layers.3', 'head'."""
    return "embedding" if index == 0 else "head" if index > num_layers else f"layers.{index - 1}"


def stage_parameters(model: ModelConfig, items: range) -> Iterator[tuple[str, Parameter]]:
    """(Logical name, parameter) of the layers `items` (indices of the list) in forward order, each tensor once."""
    seen: set[str] = set()
    for index in items:
        prefix = layer_name(index, model.num_layers)
        for parameter in model_layers(model)[index].parameters:
            name = parameter.copy_of or f"{prefix}.{parameter.name}"
            if name not in seen:
                seen.add(name)
                yield name, parameter


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Logical name -> shape without padding of every tensor of the model, in its order; a tied one once."""
    return {name: parameter.shape for name, parameter in stage_parameters(model, range(model.num_layers + 2))}


def add_up(chosen: Iterable[Layer], value: Callable[[Layer], float]) -> float:
    """Sum of `value` over layers; asked once of those that are alike."""
    return sum(number * value(layer) for layer, number in Counter(chosen).items())


def _each_once(model: ModelConfig) -> Iterator[tuple[Layer, Parameter]]:
    return ((layer, p) for layer in model_layers(model) for p in layer.parameters if p.copy_of is None)


def count_parameters(model: ModelConfig) -> int:
    """Elements of all logical parameters, vocabulary unpadded; tied weights count once."""
    return sum(p.numel for _, p in _each_once(model))


def count_trained_parameters(model: ModelConfig) -> int:
    """Those that are not frozen."""
    return sum(p.numel for _, p in _each_once(model) if not p.frozen)


def count_active_parameters(model: ModelConfig) -> int:
    """Those that a token meets: of the experts of a block, those that it takes."""
    return sum(layer.met(p) for layer, p in _each_once(model))


def flops_per_iteration(model: ModelConfig, global_batch_size: int, tensor_model_parallel_size: int = 1) -> int:
    """Model FLOPs of one iteration, forward and backward, in Megatron-LM's convention: 2 per multiply-add, backward
    counted twice a forward, causal attention halved, nothing for recomputation, the output layer with the padded
    vocabulary. Other conventions count differently, so this one is named wherever the number is printed.

    With B samples of s tokens, width h, L layers, queries q = a*d, keys k = g*d, MLP width f with c matrices (3 when
    gated, else 2) and padded vocabulary V::

        6*B*s * (L*h*f*c + L*h*(2q + 2k) + h*V) + 6*B*s*s*q*L

    Of experts those count that a token takes, and the router. A frozen matrix has no gradient; adapters have.
    """
    layers = model_layers(model)
    per_token = 3 * sum(layer.flops(tensor_model_parallel_size) for layer in layers)
    if model.lora.lora_rank is not None:
        per_token -= sum(layer.flops(tensor_model_parallel_size, core=False) for layer in layers)
        per_token += sum(6 * layer.met(p) for layer in layers for p in layer.parameters if not p.frozen)
    return global_batch_size * model.seq_length * per_token
