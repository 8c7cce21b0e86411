"""Programs of forwards alone: evaluation, and generation, where the last stage's token begins the next round.

In generation a group of sequences goes through all stages once a token. Round t of stage s is written as stage t * S +
s of S, on the rank of s. So what a token waits for is what every forward waits for: F(0, g, t + 1) needs the output of
F(S - 1, g, t), the token that was chosen there, and the message that brings it back is a SEND_F like any other. What is
proved, priced and drawn of a training program is so of this one, by the same tools.

    p=2, two groups, three rounds       rank 0  0F0 0F1 2F0 2F1 4F0 4F1 ...        p groups keep p ranks busy: with g
                                        rank 1  ... 1F0 1F1 3F0 3F1 5F0 5F1        groups each works min(1, g/p)

Evaluation is one round. The first round of generation is the prompt: it may come in chunks, which fill the pipeline
where there are few groups. A chunk's keys and values stay in its stage's cache; only the last one goes on to round 1.

    p=2, one group of three chunks      rank 0  0F1 0F2 0F0 ... 2F0 ...
                                        rank 1  ... 1F1 1F2 1F0 ... 3F0
"""

from collections.abc import Iterator
from functools import cache

from megalite.schedule.action import SEND_F, Action, forward
from megalite.schedule.passes import insert_communication
from megalite.schedule.program import BatchRange, PeakActivations, Program, Rounds
from megalite.schedule.stage_placement import StagePlacement


@cache
def forward_program(
    placement: StagePlacement, num_groups: int, *, rounds: int = 1, chunks: tuple[int, ...] | None = None
) -> Program:
    """Every stage runs all groups in turn, first chunk of the model first, round after round; only replica 0 is used.

    placement: of the model's stages. chunks: of each group's prompt, at least 1 each; None: 1.
    Micro-batch g is group g, in the first round the last chunk of its prompt; the chunks before it are micro-batches
    num_groups, num_groups + 1, ..., group after group.
    """
    chunks = chunks or (1,) * num_groups
    assert len(chunks) == num_groups and min(chunks) >= 1 and rounds >= 1, (chunks, num_groups, rounds)
    stages, ranks = placement.num_stages, placement.num_ranks
    as_they_end = sorted(range(num_groups), key=chunks.__getitem__)  # their prompts, in the first round
    first = [num_groups + sum(chunks[:g]) - g for g in range(num_groups)]

    def prompts(batch: BatchRange) -> Iterator[int]:
        for turn in range(max(chunks)):
            for group, count in enumerate(chunks):
                if turn < count:
                    yield batch.start + (group if turn == count - 1 else first[group] + turn)

    def order(rank: int, batch: BatchRange) -> Iterator[Action]:
        for turn in range(rounds):
            for stage, replica in placement.stages_of(rank):
                if replica == 0:
                    groups = prompts(batch) if turn == 0 else (batch.start + group for group in as_they_end)
                    own = (group for group in groups if placement.rank_of(stage, 0, group) == rank)
                    yield from (forward(turn * stages + stage, microbatch) for microbatch in own)

    program = Program(
        name="decode" if rounds > 1 else "forward only",
        placement=placement.repeated(rounds),
        num_microbatches=sum(chunks),
        order=lambda rank, batch: list(order(rank, batch)),
        weight_versions=(1,) * ranks,
        peak_activations=(PeakActivations(0),) * ranks,
        staleness=(0,) * (stages * rounds),
        rounds=Rounds(rounds, num_groups),
    )
    # A message comes back to the first rank: posted ahead, its receive would wait for a send that stands behind it.
    lowered = insert_communication(program, ahead=1 if rounds == 1 else 0)

    def without_tokens_of_chunks(rank: int, batch: BatchRange) -> list[Action]:
        """Nothing is chosen after the chunks before a prompt's last, so nothing comes back to the first stage."""
        ends, groups = stages - 1, range(batch.start, batch.start + num_groups)
        actions = lowered.order(rank, batch)
        return [a for a in actions if not (a.kind == SEND_F and a.stage == ends and a.microbatch not in groups)]

    return lowered.with_order(without_tokens_of_chunks)


def token_pairs(placement: StagePlacement) -> frozenset[tuple[int, int]]:
    """Neighbours in generation (lower, higher): tokens come back from the last stage to the first."""
    return placement.repeated(2).neighbours
