"""Names of parameters, the same at any layout: `3.weight` is that of layers[3]; traced layers keep their module's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from megalite.config import OPTIMIZER_SPECS
from megalite.errors import ConfigError
from megalite.library.traced_layer import BODY, TracedLayer


def stored_tensors(layer: nn.Module, index: int) -> Iterator[tuple[str, Tensor, tuple[str, ...]]]:
    """(Name, tensor, names in the module's state dict) of the parameters and persistent buffers of layers[index]."""
    if isinstance(layer, TracedLayer):
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            keys = layer.keys[name.removeprefix(BODY)]
            if keys or isinstance(tensor, nn.Parameter):
                yield name.removeprefix(BODY), tensor, keys
        return
    for name, tensor in layer.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            yield f"{index}.{name}", tensor, (f"{index}.{name}",)


class Names:
    """The names of all layers' tensors, of each the first, and which layers have it.

    layers_of: name -> indices of the layers that hold it, ascending. trained: names of what learns.
    aliases: what a state dict calls them besides -> name.
    matrices: names of what Muon and its like update as matrices: of two dimensions, in one layer alone, and neither
        looked up (embeddings) nor the last of all, which gives the output.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._of: dict[int, str] = {}
        self.layers_of: dict[str, list[int]] = {}
        self.trained: set[str] = set()
        self.aliases: dict[str, str] = {}
        holders: dict[str, int] = {}
        for index, layer in enumerate(layers):
            for name, tensor, keys in stored_tensors(layer, index):
                known = self._of.setdefault(id(tensor), name)
                if holders.setdefault(known, id(tensor)) != id(tensor):
                    raise ConfigError(f"layers[{index}]: a layer before it has another {known}; trace one module only")
                self.layers_of.setdefault(known, []).append(index)
                self.aliases |= dict.fromkeys(keys, known)
                if tensor.requires_grad:
                    self.trained.add(known)
        self.matrices = self._matrices(layers)

    def _matrices(self, layers: Sequence[nn.Module]) -> frozenset[str]:
        looked_up = {id(part.weight) for layer in layers for part in layer.modules() if isinstance(part, nn.Embedding)}
        looked_up.update(*(layer.tables for layer in layers if isinstance(layer, TracedLayer)))
        found, last = [], ""
        for index, layer in enumerate(layers):
            for _, tensor, _ in stored_tensors(layer, index):
                if tensor.dim() == 2 and (last := self._of[id(tensor)]) in self.trained:
                    found += [last] * (id(tensor) not in looked_up and len({*self.layers_of[last]}) == 1)
        return frozenset(found) if len(found) == 1 else frozenset(name for name in found if name != last)

    def updated_whole(self, optimizer: str) -> Callable[[str, int], bool] | None:
        """(Name, dimensions) -> whether the optimizer updates it as a matrix; None: it has no such rule. Raises
        ConfigError where it has, and there is no matrix."""
        if OPTIMIZER_SPECS[optimizer].whole is None:
            return None
        if not self.matrices:
            raise ConfigError(
                f"`optimizer`={optimizer}: no layer has a matrix for it (of two dimensions, no embedding, in one layer "
                "alone); use AdamW"
            )
        return lambda name, dims: name in self.matrices

    def of(self, tensor: Tensor) -> str:
        """Its name."""
        return self._of[id(tensor)]

    def copied(self, layers: Mapping[int, nn.Module], memo: dict[int, Any]) -> dict[int, nn.Module]:
        """Copies of layers by their indices, with the same names; what several of them share, their copies do. memo: by
        id, what has a copy already, or stays as it is; all that is copied is added."""
        copies = deepcopy(dict(layers), memo)
        for index, layer in layers.items():
            pairs = zip(stored_tensors(layer, index), stored_tensors(copies[index], index), strict=True)
            for (_, old, _), (_, new, _) in pairs:
                self._of[id(new)] = self.of(old)
                new.__dict__.update(old.__dict__)  # its placement
        return copies

    def tied(self, cuts: Sequence[range]) -> tuple[frozenset[str], list[int]]:
        """(The trained parameters that several stages hold, these stages). Raises ConfigError where some are on others
        than the rest."""
        stage_of = {index: stage for stage, items in enumerate(cuts) for index in items}
        found = {name: sorted({stage_of[i] for i in self.layers_of[name]}) for name in sorted(self.trained)}
        apart = {name: stages for name, stages in found.items() if len(stages) > 1}
        one = next(iter(apart), "")
        for two, stages in apart.items():
            if stages != apart[one]:
                raise ConfigError(
                    f"layers: {one} is shared by stages {apart[one]} and {two} by stages {stages}; parameters that "
                    "cross stages must all be shared by the same ones: cut the layers otherwise (sizes=...)"
                )
        return frozenset(apart), apart.get(one, [])
