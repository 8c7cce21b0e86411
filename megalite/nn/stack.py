"""A stage's slice of the model: named layers, run in order, some of them recomputed in backward.

Recomputation (Chen et al., arXiv 1604.06174; granularity and methods as Megatron-LM names them, arXiv 2205.05198):

    selective   inside attention only (`nn.attention.core`)
    full        whole blocks. uniform: every chunk of N blocks, from its input; block: the first N blocks of the stage,
                each from its own

Dropout is keyed, so a recomputed block sees the same masks without any generator state being saved.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.config import ModelConfig
from megalite.inventory import Recompute, given_recompute, recompute_ranges
from megalite.microbatch import Microbatch
from megalite.nn.block import Block
from megalite.nn.embedding import Embedding
from megalite.nn.head import Head
from megalite.nn.init import logical_parameters
from megalite.nn.kv_cache import LayerCache
from megalite.parallel.tensor import LossKernels


class LayerStack(nn.Module):
    """The layers of a stage: some of 'embedding', 'layers.i' and 'head'. The paths of its parameters are their
    logical names.

    If the stage holds both ends and the embeddings are tied, they share one parameter.
    """

    def __init__(
        self, config: ModelConfig, named_layers: Sequence[tuple[str, nn.Module]], recompute: Recompute | None = None
    ) -> None:
        """recompute: None: as flags say it of the first stage."""
        super().__init__()
        self.config = config
        self.names = tuple(name for name, _ in named_layers)
        blocks = nn.ModuleDict()
        for name, layer in named_layers:  # registered in the order of the model: parameters() follows it
            kind, _, index = name.partition(".")
            if index:
                blocks[index] = layer
                self.add_module(kind, blocks)
            else:
                self.add_module(name, layer)
        if config.shares_embedding and "embedding" in self.names and "head" in self.names:
            head, embedding = cast(Head, self.get_submodule("head")), cast(Embedding, self.get_submodule("embedding"))
            weight, uses = cast(nn.Parameter, embedding.word_embeddings.weight), 1
            uses += getattr(head.copies[0].weight, "sink_uses", 1)
            for copy in head.copies:
                copy.weight = weight
            weight.sink_uses = uses  # type: ignore[attr-defined]  # ours: contributions per micro-batch
        places = [i for i, name in enumerate(self.names) if name.startswith("layers.")]
        self.recompute_ranges = recompute_ranges(len(self.names), places, recompute or given_recompute(config)[0])

    def forward(self, x: Tensor | None, microbatch: Microbatch) -> Tensor:
        """Runs all layers; the first stage gets None, the last returns the summed loss."""

        def run(layers: Sequence[nn.Module], x: Tensor | None) -> tuple[Tensor | None]:
            for layer in layers:
                x = layer(x, microbatch)
            return (x,)

        return trainable(*self.by_ranges(run, x))

    def by_ranges(self, run: Callable[..., Sequence[Any]], *parts: Any) -> Sequence[Any]:
        """`run(layers, *parts)` for one range of layers after the other, some of them once more in backward."""
        layers, xs = self.ordered(), list(parts)
        for begin, end, recompute in self.recompute_ranges:
            if recompute and torch.is_grad_enabled():
                xs = checkpoint(run, layers[begin:end], *xs, use_reentrant=False, preserve_rng_state=False)
            else:
                xs = [*run(layers[begin:end], *xs)]
        return xs

    def body(self, x: Tensor | None, microbatch: Microbatch, caches: Sequence[LayerCache] = ()) -> Tensor:
        """All layers but the head, without recomputation. The micro-batch's tokens are added to the caches, one of each
        block of this stage, if there are any."""
        entries = iter(caches)
        for layer in self.ordered():
            if isinstance(layer, Head):
                break
            x = layer(x, microbatch, *([next(entries)] if caches and isinstance(layer, Block) else []))
        assert x is not None
        return x

    def compile_blocks(self, backend: str = "inductor", *, on_device: bool = False) -> None:
        """`torch.compile` for every block by itself: all blocks of a kind share their compilations. on_device: for the
        loss, too."""
        for layer in self.ordered():
            if isinstance(layer, Block):
                layer.compile_segments(backend)
            elif isinstance(layer, Head) and on_device:
                layer.kernels = LossKernels.compiled(backend)  # of what is between its GEMMs; eager is faster on a CPU

    def ordered(self) -> list[nn.Module]:
        """The layers in the order of the model."""
        return [self.get_submodule(name) for name in self.names]

    logical_parameters = logical_parameters  # as a method


def trainable(x: Tensor) -> Tensor:
    """What leaves a stage; a first stage with nothing to train has no graph."""
    return x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()
