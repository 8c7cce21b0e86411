"""Generation, episode after episode.

    slots     as many groups as pipeline ranks are under way at once; a group that has ended leaves its slot to the next
    episode   a program of forwards: for new groups their prompt, for others the token that is pending, then rounds of
              one token for everyone. Nothing is agreed upon inside of it
    between   the stages tell each other which tokens were chosen, so all of them know what comes next

Replicas share out the requests and go their own ways. Where they hold each other's experts they go together: slot by
slot, with equally long prompts, so that all of them run the same layers at the same time.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

import torch
from torch import Tensor

from megalite.comm import Axis, Channel, all_gather_json, all_reduce_
from megalite.engine import run_forwards
from megalite.generation.groups import Request, Row, Slot, group_size, nothing
from megalite.generation.sampling import NO_NUMBER, Sampling
from megalite.generation.stages import GenerationStage, ModelParts, Turn
from megalite.nn import Block, LayerCache
from megalite.schedule import Program, StagePlacement, forward_program, validate

OnTokens = Callable[[Request, list[int]], None]
"""Told of the tokens that a request got, as they come: on every rank that generates it."""

ROUNDS = 16
"""Tokens between two agreements of the stages; in one process every token is told at once."""
LEAST_CHUNK = 64
"""Tokens of all sequences of a group: the prompts are not cut into smaller pieces than this."""
PIECES = 4
"""Of the prompts, a stage: so many in flight that the pipeline fills and drains in a fraction of the time."""


@dataclass
class Generator:
    """Continues texts on the ranks that hold a model."""

    parts: ModelParts
    rank: int = 0  # of the pipeline
    placement: StagePlacement = field(default_factory=lambda: StagePlacement(1, ((0,),)))
    channel: Channel = field(default_factory=lambda: Channel(Axis.single("pp"), Axis.single("pp"), ()))
    stages: Axis = field(default_factory=lambda: Axis.single("pp"))  # through the pipeline; `together`, through all
    replicas: Axis = field(default_factory=lambda: Axis.single("dp"))  # those that generate texts of their own
    together: bool = False  # whether replicas share experts, so that they take every step together
    num_choices: int | None = None  # ids from here on are never chosen; None: the model's vocabulary
    rounds: int | None = None  # instead of `ROUNDS`
    least_chunk: int = LEAST_CHUNK

    def run(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stops: Collection[int],
        micro_batch_size: int = 1,
        ended: Callable[[list[int]], bool] = lambda new: False,
        on_tokens: OnTokens = lambda request, tokens: None,
    ) -> list[list[int] | None]:
        """The tokens that follow each request, on every rank; None where the model's logits are not numbers.

        All ranks call it with the same arguments. A sequence ends after `max_new_tokens`, or before one of `stops`.

        ended: whether a continuation is complete, asked after some tokens each time.
        on_tokens: told of the tokens of this replica's requests as they come.
        """
        rows = [Row(request, self.parts.config.text_positions, max_new_tokens) for request in requests]
        waiting = self._dealt(rows, micro_batch_size)
        slots: list[Slot] = []
        while slots := self._next(slots, waiting):
            self._episode(slots, sampling, stops, on_tokens)
            for row in (row for slot in slots for row in slot.rows):
                row.ended = row.ended or ended(row.new)
        number = {id(row): place for place, row in enumerate(rows)}
        own = self._share(rows, self.replicas.rank)
        mine = {str(number[id(row)]): None if row.broken else row.new for row in own}
        texts = {int(place): new for part in all_gather_json(mine, self.replicas) for place, new in part.items()}
        return [texts[place] for place in range(len(rows))]

    def _next(self, slots: Sequence[Slot], waiting: Iterator[Slot]) -> list[Slot]:
        """Groups that go on, and others in place of those that have ended, to the last that has tokens to come.

        A slot's number says which of the ranks of a stage that take turns has its caches, so there a group keeps its
        place, and one in between whose group has ended gets a group of nothing.
        """
        going = [slot if slot.remaining else next(waiting, None) for slot in slots]
        going += islice(waiting, self.placement.num_ranks - len(slots))
        last = max((number for number, slot in enumerate(going, 1) if slot is not None), default=0)
        turns = bool(self.placement.workers)
        return [slot or Slot([[nothing()]], 0) for slot in going[:last] if slot is not None or turns]

    def _share(self, rows: Sequence[Row], replica: int) -> list[Row]:
        """The rows that a replica generates: rows of like lengths side by side."""
        return sorted(rows, key=lambda row: -min(len(row.request.ids), row.limit))[replica :: self.replicas.size]

    def _dealt(self, rows: Sequence[Row], micro_batch_size: int) -> Iterator[Slot]:
        """Slots in the order in which they are taken up."""
        everyone = range(self.replicas.size) if self.together else [self.replicas.rank]
        shares = [self._share(rows, replica) for replica in everyone]
        most = max(map(len, shares))
        size = group_size(most, micro_batch_size, self.placement.num_ranks)
        for first in range(0, most, size):
            groups = [share[first : first + size] or [nothing()] for share in shares]
            yield Slot(groups, everyone.index(self.replicas.rank))

    def _episode(self, slots: Sequence[Slot], sampling: Sampling, stops: Collection[int], on_tokens: OnTokens) -> None:
        """New groups' prompts, then a token for everyone, round after round."""
        pending = [slot.pending(self.parts.unit) for slot in slots]
        alone = self.placement.num_ranks == 1 and not self.together
        under_way = [slot for slot in slots if slot.remaining]
        rounds = min(max(slot.remaining for slot in under_way), min(slot.room for slot in under_way))
        rounds = min(rounds, self.rounds or (1 if alone else ROUNDS))
        chunks = tuple(self._chunks(slot, tokens, len(slots)) for slot, tokens in zip(slots, pending, strict=True))
        program = proved_program(self.placement, len(slots), rounds, chunks)
        turns = self._turns(slots, pending, chunks)
        choices = self.num_choices or self.parts.config.vocab_size
        stages = {
            key: GenerationStage(key[0], rounds, self.parts, turns, sampling, choices)
            for key in program.placement.stages_of(self.rank)
        }
        run_forwards(program, self.rank, stages, self.channel, turns)
        chosen = self._exchange(slots, turns, rounds)
        for place, (slot, tokens) in enumerate(zip(slots, pending, strict=True)):
            before = [len(row.text) for row in slot.mine]
            slot.columns += tokens.shape[1] + rounds - 1
            slot.take(chosen[:, place].tolist(), stops)
            for row, old in zip(slot.mine, before, strict=True):
                if len(row.text) > old:
                    on_tokens(row.request, row.text[old:])

    def _chunks(self, slot: Slot, tokens: Tensor, num_slots: int) -> int:
        """Into how many parts a prompt is cut: enough of them to fill the pipeline."""
        ranks = self.placement.num_ranks
        n = tokens.shape[1]
        if ranks == 1 or slot.columns or self.parts.cp.size > 1 or self.placement.workers:
            return 1
        return max(1, min(-(-PIECES * ranks // num_slots), n, tokens.numel() // self.least_chunk))

    def _turns(self, slots: Sequence[Slot], pending: Sequence[Tensor], chunks: Sequence[int]) -> list[Turn]:
        """The micro-batches of the program, in the order of their numbers."""
        last: list[Turn] = []
        before: list[Turn] = []
        for slot, tokens, count in zip(slots, pending, chunks, strict=True):
            column = slot.columns
            if not slot.caches:
                config = self.parts.config
                # A slot that has its tokens goes on to the end of an episode, which others may need.
                new = slot.remaining + (self.rounds or ROUNDS) if slot.remaining else config.text_positions
                most = tokens.shape[1] + min(new, config.text_positions) + config.lora.prefix
                for stage, stack in self.parts.stages.items():
                    blocks = sum(isinstance(module, Block) for module in stack.modules())
                    slot.caches[stage] = [LayerCache(most) for _ in range(blocks)]
            parts = tokens.tensor_split(count, 1)
            for number, part in enumerate(parts):
                turn = Turn(slot, part, column, number == count - 1)
                (last if turn.last else before).append(turn)
                column += part.shape[1]
        return [*last, *before]

    def _exchange(self, slots: Sequence[Slot], turns: Sequence[Turn], rounds: int) -> Tensor:
        """The chosen tokens of all groups, on every stage: int64 `[replicas, slots, rounds, b]` on the CPU."""
        width = max(len(group) for slot in slots for group in slot.groups)
        shape = (len(slots[0].groups), len(slots), rounds, width)
        table = torch.full(shape, NO_NUMBER, device=self.parts.device)
        for place, (slot, turn) in enumerate(zip(slots, turns, strict=False)):
            for round_, tokens in enumerate(turn.chosen):
                table[slot.place, place, round_, : len(tokens)] = tokens
        all_reduce_(table, self.stages, op="max")
        return table.cpu()


@cache
def proved_program(placement: StagePlacement, num_groups: int, rounds: int, chunks: tuple[int, ...]) -> Program:
    """The program of an episode. Raises ScheduleError where it is wrong."""
    program = forward_program(placement, num_groups, rounds=rounds, chunks=chunks)
    validate(program)
    return program
