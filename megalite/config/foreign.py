"""A module of the user's own in place of our families, in the model section: `--model-module`."""

from __future__ import annotations

from megalite.config.schema import Spelled, option

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
