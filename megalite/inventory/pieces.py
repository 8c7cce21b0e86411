"""What layers are made of: matrix products, and the parameters of norms and linear layers."""

from dataclasses import dataclass, replace
from functools import partial

from megalite.config import ModelConfig, ParallelConfig, hidden_std, residual_std
from megalite.inventory.parameter import Parameter, share
from megalite.inventory.parameter_placement import Shape


@dataclass(frozen=True)
class Product:
    """`[m, k] x [k, n]`, m the tokens of a micro-batch.

    cut: which of n and k the tensor axis cuts, none where empty. multiple: of each rank's part of it. core: of two
    activations, inside attention: no weights, cut by heads, causal (half of it counts), and what selective
    recomputation repeats. Of experts, n or k is that of all that a token takes.
    """

    name: str
    n: int
    k: int
    cut: str
    multiple: int = 1
    core: bool = False

    def local(self, shards: int) -> tuple[int, int]:
        """(n, k) of one of `shards` tensor-parallel ranks."""
        if not self.cut:
            return self.n, self.k
        if self.cut == "n":
            return share(self.n, shards, self.multiple), self.k
        return self.n, share(self.k, shards, self.multiple)

    def shards(self, parallel: ParallelConfig) -> int:
        """Ranks of the axis that cuts it."""
        of_expert = self.name.startswith("experts.")
        return parallel.expert_tensor_size if of_expert else parallel.tensor_model_parallel_size

    def flops(self, shards: int | None = None) -> int:
        """Of one token forward, 2 per multiply-add. shards: with what `shards` tensor-parallel ranks pad."""
        n, k = self.n, self.k
        if shards is not None and self.cut:
            n = share(self.n, shards, self.multiple) * shards
        return n * k if self.core else 2 * n * k


def norm(name: str, size: int, model: ModelConfig, partial: str = "sequence") -> list[Parameter]:
    """Of the last dimension of `size`. partial: as in `Parameter`."""
    weight = Parameter(f"{name}.weight", (size,), partial=partial, decay=False, init_value=norm_start(model))
    bias = Parameter(f"{name}.bias", (size,), partial=partial, decay=False)
    return [weight, bias] if model.normalization == "LayerNorm" else [weight]


def norm_start(model: ModelConfig) -> float:
    """The weight of a norm that leaves what it has normalised as it is."""
    return 0.0 if model.apply_layernorm_1p else 1.0


def column(name: str, rows: Shape, columns: int, model: ModelConfig, bias: bool) -> list[Parameter]:
    """Outputs are cut. A gated projection keeps gate and value apart in a leading dimension, so that a slice of it is a
    rectangle."""
    cut = len(rows) - 1
    weight = Parameter(f"{name}.weight", (*rows, columns), cut, init_std=hidden_std(model))
    return [weight, Parameter(f"{name}.bias", rows, cut, decay=False)] if bias else [weight]


def whole(name: str, rows: int, columns: int, model: ModelConfig) -> Parameter:
    """A matrix that every rank has, for its tokens."""
    return Parameter(f"{name}.weight", (rows, columns), partial="sequence", init_std=hidden_std(model))


def row(name: str, rows: int, columns: int, model: ModelConfig, bias: bool) -> list[Parameter]:
    """Inputs are cut; writes to the residual stream."""
    weight = Parameter(f"{name}.weight", (rows, columns), 1, init_std=residual_std(model))
    return [weight, Parameter(f"{name}.bias", (rows,), partial="sequence", decay=False)] if bias else [weight]


def mlp(name: str, width: int, model: ModelConfig) -> tuple[list[Parameter], list[Parameter]]:
    """Up (gated: with the gate in front) and down, `name` inside of the block."""
    h, bias, up = model.hidden_size, model.add_bias_linear, (2, width) if model.gated else (width,)
    return column(f"{name}.fc1", up, h, model, bias), row(f"{name}.fc2", h, width, model, bias)


def router(model: ModelConfig) -> list[Parameter]:
    """Logits of a token's experts, in fp32 or wider."""
    number, on_all = model.experts.num_experts or 1, partial(Parameter, partial="sequence", wide=True)
    weight = on_all("mlp.router.weight", (number, model.hidden_size), init_std=hidden_std(model))
    return [weight, *([on_all("mlp.router.bias", (number,), decay=False)] if model.experts.moe_router_bias else [])]


def experts(model: ModelConfig) -> tuple[list[Parameter], list[Parameter]]:
    """The same of all experts, in stacked matrices, which are cut over `etp` and dealt out over `ep`."""
    number, h, f, bias = model.experts.num_experts or 1, model.hidden_size, model.expert_ffn_size, model.add_bias_linear
    columns = column("mlp.experts.fc1", (number, *((2, f) if model.gated else (f,))), h, model, bias)
    rows = [Parameter("mlp.experts.fc2.weight", (number, h, f), 2, init_std=residual_std(model))]
    rows += [Parameter("mlp.experts.fc2.bias", (number, h), decay=False)] if bias else []
    up, down = ([replace(each, family="expert", dealt=True) for each in part] for part in (columns, rows))
    return up, down
