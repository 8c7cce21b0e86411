"""Counting what one rank holds while it runs its list: activations, weight versions, gradient buffers."""

from collections.abc import Sequence
from fractions import Fraction

from megalite.schedule.action import AWAITING_WEIGHT, BACKWARD_WEIGHT, FORWARD, RECOMPUTE, STEP, Action, StageKey


def activation_counts(actions: Sequence[Action]) -> list[tuple[int, int]]:
    """After each action: (micro-batch chunks whose backward has not begun, those that only wait for their W).

    A stage that runs its forwards again holds a whole chunk from R on; before that it has the input alone, which does
    not count.
    """
    again = {part.stage_key for action in actions for part in action.computations() if part.kind == RECOMPUTE}
    whole = weight_only = 0
    counts = []
    for action in actions:
        # Inside an OVERLAP the forward's activations appear before the backward's are gone.
        for part in sorted(action.computations(), key=lambda part: part.kind not in (FORWARD, RECOMPUTE)):
            if part.kind in (FORWARD, RECOMPUTE):
                whole += part.kind == RECOMPUTE or part.stage_key not in again
                counts.append((whole, weight_only))
            elif part.kind != BACKWARD_WEIGHT:
                whole -= 1
            weight_only += AWAITING_WEIGHT.get(part.kind, 0)
        counts.append((whole, weight_only))
    return counts


def peak_activations(actions: Sequence[Action], weight_fraction: Fraction | float = Fraction(1)) -> Fraction | float:
    """Most activations held at once, in chunks; one that waits for its W counts `weight_fraction`, M_W / M_B (about
    32/34 of a transformer layer with fused attention)."""
    held = (whole + weight_fraction * weight_only for whole, weight_only in set(activation_counts(actions)))
    return max(held, default=Fraction(0))


def live_versions(actions: Sequence[Action]) -> int:
    """Most weight versions of one stage that are needed at once: those with a use ahead, and always the newest."""
    last_use: dict[StageKey, dict[int, int]] = {}
    for position, action in enumerate(actions):
        for part in action.computations():
            if part.kind != BACKWARD_WEIGHT:
                last_use.setdefault(part.stage_key, {})[part.version] = position
    most = 1
    newest: dict[StageKey, int] = {}
    for position, action in enumerate(actions):
        if action.kind == STEP:
            stage = action.stage_key
            newest[stage] = action.microbatch + 1
            needed = {version for version, last in last_use.get(stage, {}).items() if last > position}
            # Versions not yet born are counted when their STEP comes.
            most = max(most, len({version for version in needed if version <= newest[stage]} | {newest[stage]}))
    return most


def gradient_buffers(actions: Sequence[Action], updates: Sequence[int | None]) -> int:
    """Most updates of a stage whose gradient is being summed or waits for its STEP. updates: of each action, if any."""
    open_updates: dict[StageKey, set[int]] = {}
    most = 1
    for action, update in zip(actions, updates, strict=True):
        stage = action.stage_key
        if action.kind == STEP:
            open_updates.setdefault(stage, set()).discard(action.microbatch)
        elif update is not None:
            open_updates.setdefault(stage, set()).add(update)
            most = max(most, len(open_updates[stage]))
    return most
