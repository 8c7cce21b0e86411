"""`--loss-by-part`: which part of a blend a sample comes from."""

from __future__ import annotations

from pathlib import Path

from megalite.data.blend import BlendedDataset
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.phases import PhasedDataset
from megalite.errors import DataError


class BlendParts:
    """The number of each sample's part; a file that occurs twice, or in two phases, is one part. names: of the parts,
    in order: of the files, or whole paths where two files share one. Raises DataError where there is but one part."""

    def __init__(self, dataset: GPTDataset | BlendedDataset | PhasedDataset) -> None:
        paths = list(dict.fromkeys(_paths(dataset)))
        if isinstance(dataset, GPTDataset) or len(paths) < 2:
            raise DataError(f"`loss_by_part`: all training data are {paths[0]}; name more than one, or drop it")
        self._dataset, self._numbers = dataset, {path: number for number, path in enumerate(paths)}
        short = tuple(Path(path).name for path in paths)
        self.names = short if len(set(short)) == len(short) else tuple(paths)

    def __call__(self, sample: int) -> int:
        return self._numbers[self._dataset.source_of(sample)[0].store.name]


def _paths(dataset: GPTDataset | BlendedDataset | PhasedDataset) -> list[str]:
    if isinstance(dataset, GPTDataset):
        return [dataset.store.name]
    return [path for part in dataset.parts for path in _paths(part)]
