"""Weights that nothing trains: no gradient, no master. They are loaded once: they are the model beside adapters."""

from collections.abc import Iterator, Sequence

from megalite.comm import TensorShard, shards_of_range
from megalite.parallel.zero.bucket import overlaps
from megalite.parallel.zero.parameter_buffers import ParameterBuffers
from megalite.parallel.zero.unshard import BucketWeights


def frozen_shards(families: Sequence[ParameterBuffers]) -> Iterator[TensorShard]:
    """The frozen weights among them that this rank owns, as rectangles to be written into."""
    for bucket in (bucket for family in families for bucket in family.frozen):
        for range_, inside, own in overlaps(bucket.plan.ranges, bucket.owned_start, bucket.owned_stop):
            entry, part = range_.entry, bucket.weights[0].shard[own]
            yield from shards_of_range(entry.name, entry.placement, entry.shape, part, inside.start, replica=0)


def release_frozen(families: Sequence[ParameterBuffers]) -> None:
    """Lets go of the memory of frozen weights, which no parameter is a view of any more."""
    for family in families:
        for bucket in family.frozen:
            for weights in bucket.weights:
                assert isinstance(weights, BucketWeights), "neither in shards nor on the host"
                weights.full = weights.shard = weights.full.new_empty(0)
        family.frozen.clear()
