"""What each rank would write of a checkpoint: together every piece once, and nobody what another writes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

from megalite.checkpoint import Checkpointer
from megalite.comm import TensorShard
from megalite.inventory import Box
from megalite.rehearsal.match import Fault
from megalite.rehearsal.order import where
from megalite.rehearsal.record import RankRecord
from megalite.train import OpenRun


class Piece(NamedTuple):
    """A rectangle of a logical tensor that is no copy of another rank's. place: the line that says so."""

    name: str
    box: Box
    place: str

    def __str__(self) -> str:
        return f"{self.name}{self.box} at {self.place}"


def pieces_of(opened: OpenRun) -> list[Piece]:
    """Lists a checkpoint of the run as its state is saved; nothing is written."""
    made, places, listed = TensorShard.__post_init__, dict[int, str](), list[TensorShard]()

    def noted(shard: TensorShard) -> None:
        made(shard)
        places[id(shard)] = where()

    def save(_: Any, __: int, shards: Sequence[TensorShard], *more: Any, **named: Any) -> str:
        listed.extend(shards)
        return ""

    with patch.object(TensorShard, "__post_init__", noted), patch.object(Checkpointer, "save", save):
        opened.state.save(opened.trainer.progress)
    return [Piece(x.name, x.box, places.get(id(x), "")) for x in listed if not x.replica and x.local.numel()]


def pieces(records: Mapping[int, RankRecord]) -> Iterable[Fault]:
    """Pieces that are written twice, by two ranks or by one; one of each pair of lines."""
    by_name: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    found: dict[tuple[str, str], Fault] = {}
    advice = "one of them holds a copy: give it a replica's number, or list it once"
    for rank, record in records.items():
        for piece in record.pieces:
            for other, theirs in by_name[piece.name]:
                if piece.box.intersect(theirs.box):
                    text = f"rank {other} saves {theirs}\n    and rank {rank} saves {piece}\n    {advice}"
                    found.setdefault((theirs.place, piece.place), Fault("save", text))
            by_name[piece.name].append((rank, piece))
    return found.values()
