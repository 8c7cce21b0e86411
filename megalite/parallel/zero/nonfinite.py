"""Which gradients are not finite, for a message."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.parallel.zero.parameter_buffers import ParameterBuffers


def where_not_finite(families: Sequence[ParameterBuffers], *, overwritten: bool) -> str:
    """Which of this rank's reduced gradients are not, as text. overwritten: they are those of another batch by now."""
    if overwritten:
        return "of which tensor is not known: its gradients have been overwritten since"
    found = []
    for bucket in (bucket for family in families for bucket in family.buckets):
        for range_ in bucket.plan.ranges:
            begin = max(range_.start, bucket.owned_start) - bucket.owned_start
            end = min(range_.stop, bucket.owned_stop) - bucket.owned_start
            if begin < end and not bool(bucket.gradient.reduced[begin:end].isfinite().all()):
                found.append((range_.entry.index, range_.entry.name))
    if not found:
        return "from gradients of other ranks"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"here in the gradient of {min(found)[1]}{more}"
