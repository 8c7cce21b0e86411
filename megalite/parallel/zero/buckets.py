"""The parameters and gradients of one family of a stage in flat, contiguous memory.

Every parameter becomes a view of a flat compute buffer and shares its version counter: an update in place between a
forward and its backward is an error that autograd reports, not a silently wrong gradient. All weight versions of a
parameter add into the same gradient.

    versions[0]   [ layer 3 | layer 2 | layer 1 | embedding ]      compute dtype, one per weight version
    gradient      [ bucket 0 |  bucket 1  |     bucket 2    ]      main dtype (fp32; fp64 for fp64 parameters)
                    complete first            complete last
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megalite.comm import Axis, FamilyAxes, all_reduce_
from megalite.gradient import GradSink, attach_sink
from megalite.inventory import BucketPlan, Entry, Placement, plan_buckets
from megalite.parallel.zero.gradient_sync import Bucket, ScratchPool, StreamingSink
from megalite.parallel.zero.host_memory import prefer_own_pages
from megalite.parallel.zero.launches import Launches
from megalite.parallel.zero.options import ZeroOptions
from megalite.parallel.zero.unshard import BucketWeights, Unsharder

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class ParameterBuffers:
    """Owns the memory of the parameters and gradients of one family in one stage, and reduces the gradients.

    Args:
        versions: for each weight version the (logical name, parameter) of one dtype in forward order; the same names
            and shapes in each. Each parameter carries `.placement` (`megalite.inventory.placement.Placement`) and may
            carry `.sink_uses` (contributions a micro-batch, 1).
        axes: of the family: what cuts parameters (and sums partial gradients), what ZeRO shards over, what holds copies
            of the shards.
        tied: names of parameters whose gradient another stage shares; they are reduced last, by `start_tied_reduce`.
        counts_tied: False on the stage that holds the copy: it is neither counted in the norm nor saved.
        extra_reduce: further axes that hold replicas of this stage (Chimera); tied gradients have been summed over
        them already.
        replica: which of these replicas this is; only replica 0 counts in the norm.
        keep_gradients: sharded gradients stay in memory between batches. False where a batch is one micro-batch: from
            the step to the first backward they only lie beside the activations. (Stages 0 and 1 always keep them.)
        num_gradients: updates whose gradients are in memory at once (asynchronous pipelines: 2), stages 0 and 1 only.
        whole: (name, dimensions) -> which parameters must lie in one shard (Muon's matrices).
        beside: what else this rank has, to share with it the memory that comes and goes. launches: the order in which
            reductions start, shared with other families of the stage over the same axes.
        fill: gives a parameter that came without memory ('meta') its values, as soon as it has memory: bucket after
            bucket, so that weights that are sharded are never whole. device: where (None: where the parameters are).
    """

    def __init__(
        self,
        versions: Sequence[NamedParameters],
        *,
        axes: FamilyAxes,
        options: ZeroOptions,
        tied: frozenset[str] = frozenset(),
        counts_tied: bool = True,
        extra_reduce: Sequence[Axis] = (),
        replica: int = 0,
        num_gradients: int = 1,
        keep_gradients: bool = True,
        whole: Callable[[str, int], bool] | None = None,
        beside: Sequence[ParameterBuffers] = (),
        launches: Launches | None = None,
        fill: Callable[[str, nn.Parameter], None] | None = None,
        device: torch.device | None = None,
    ) -> None:
        first = versions[0]
        assert all([n for n, _ in v] == [n for n, _ in first] for v in versions), "versions of a stage differ"
        self.axes, self.options = axes, options
        self.counts_tied, self.replica = counts_tied, replica
        self.extra_reduce = tuple(axis for axis in extra_reduce if axis.size > 1)
        self.dtype = first[0][1].dtype if first else torch.float32
        self.device = device or (first[0][1].device if first else torch.device("cpu"))
        assert all(p.dtype == self.dtype for v in versions for _, p in v), "parameters of a family have one dtype"
        entries = [
            Entry(i, name, tuple(p.shape), placement_of(name, p), whole is not None and whole(name, p.dim()))
            for i, (name, p) in enumerate(first)
        ]
        self.plans = plan_buckets(
            entries,
            zero_stage=options.stage,
            shards=axes.shard.size,
            bucket_size=options.bucket_size,
            overlap=options.overlap_grad_reduce,
            on_cpu=self.device.type != "cuda",
            tied=tied,
        )
        self.unsharder: Unsharder = beside[0].unsharder if beside else Unsharder(prefetch=options.overlap_param_gather)
        pools = [b.scratch for b in beside if b.gradient_dtype == self.gradient_dtype]
        self.scratch: ScratchPool = pools[0] if pools else ScratchPool(self.gradient_dtype, self.device)
        if options.stage >= 2:
            prefer_own_pages(self.device)
        self.buckets = [self._make_bucket(plan, keep_gradients or options.stage < 2) for plan in self.plans]
        self._weights_of: dict[int, BucketWeights] = {}
        self._attached = False
        self._launches = launches or Launches(options)
        self._launches.add(self.buckets, num_gradients)
        self.numel = self.plans[-1].stop if self.plans else 0
        for version in versions:
            self._flatten_weights([p for _, p in version], fill)
        self._make_sinks([[version[i][1] for version in versions] for i in range(len(first))])
        self._make_gradients(num_gradients)
        self.begin_batch()  # the first batch is reduced as every other

    # ---- memory ------------------------------------------------------------------------------------------------------

    @property
    def main_dtype(self) -> torch.dtype:
        """The wider of fp32 and the parameter dtype: what masters and moments are kept in."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def gradient_dtype(self) -> torch.dtype:
        halved = self.options.grad_reduce_in_bf16 and self.dtype == torch.bfloat16
        return torch.bfloat16 if halved else self.main_dtype

    @property
    def num_versions(self) -> int:
        return len(self.buckets[0].weights) if self.buckets else 0

    def _flatten_weights(
        self, parameters: Sequence[nn.Parameter], fill: Callable[[str, nn.Parameter], None] | None
    ) -> None:
        """Moves one version's parameters into flat memory: one piece, or in stage 3 one a bucket, which comes and
        goes."""
        sharded = self.options.stage == 3 and self.axes.shard.size > 1
        flat = torch.zeros(0 if sharded else self.numel, dtype=self.dtype, device=self.device)
        for bucket in self.buckets:
            plan = bucket.plan
            full = (
                torch.zeros(bucket.numel, dtype=self.dtype, device=self.device)
                if sharded
                else flat[plan.start : plan.stop]
            )
            for slot in plan.slots:
                parameter = parameters[slot.entry.index]
                empty = parameter.is_meta
                move_parameter(parameter, full[slot.start - plan.start : slot.stop - plan.start])
                if empty and fill is not None:
                    fill(slot.entry.name, parameter)
            owned = slice(bucket.owned_start - plan.start, bucket.owned_stop - plan.start)
            weights = BucketWeights(full, owned, axis=self.axes.shard, stage=self.options.stage)
            weights.free()
            bucket.weights.append(weights)
            self._weights_of.update({id(parameters[slot.entry.index]): weights for slot in plan.slots})

    def _make_bucket(self, plan: BucketPlan, keep: bool) -> Bucket:
        return Bucket(
            plan,
            stage=self.options.stage,
            axis=self.axes.shard,
            dtype=self.gradient_dtype,
            device=self.device,
            pool=None if self.options.stage < 2 or plan.tied else self.scratch,
            keep=keep,
        )

    def _make_sinks(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        """Gives the parameters (by forward index, then version) their place in the gradients."""
        for bucket in self.buckets:
            for slot in bucket.plan.slots:
                sink = self._make_sink(bucket, parameters[slot.entry.index][0])
                bucket.sinks.append(sink)
                for parameter in parameters[slot.entry.index]:
                    attach_sink(parameter, sink)

    def _make_gradients(self, number: int) -> None:
        """Makes the memory of those that stay."""
        assert number == 1 or self.options.stage < 2, "gradients that are streamed cannot be kept for two updates"
        self._selected, self._num_gradients = 0, number
        for bucket in self.buckets:
            for _ in range(1, number):
                bucket.add_gradient()
            for index in reversed(range(number if bucket.keep else 0)):
                bucket.select(index)
                _ = bucket.gradient

    def _make_sink(self, bucket: Bucket, parameter: nn.Parameter) -> GradSink:
        uses: int = getattr(parameter, "sink_uses", 1)

        def ready() -> None:
            bucket.missing -= 1
            if bucket.missing == 0:
                self._launches.ready()

        if bucket.streams:
            return StreamingSink(bucket, uses=uses, on_ready=ready)
        return GradSink(uses=uses, on_ready=ready, on_open=bucket.open)

    def memory(self) -> dict[str, int]:
        """Bytes held by this rank for weights and gradients, and for scratch (which exists only in stages 2 and 3)."""
        tensors = [t for b in self.buckets for w in b.weights for t in (w.shard, w.full)]
        weights = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        grads = [gradient for bucket in self.buckets for gradient in bucket.held()]
        held = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads}
        return {"weights": sum(weights.values()), "gradients": sum(held.values()), "scratch": self.scratch.most_bytes}

    # ---- several gradients -------------------------------------------------------------------------------------------

    def select_gradients(self, update: int) -> None:
        """Backwards, reductions and the optimizer work on the gradient of this update from here on."""
        index = update % self._num_gradients
        if index == self._selected:
            return
        self._selected = index
        self._launches.select(index)
        for bucket in self.buckets:
            bucket.select(index)

    # ---- one batch ---------------------------------------------------------------------------------------------------

    def begin_batch(self, microbatches: int | None = None) -> None:
        """The gradient is zero again. With the number of micro-batches that this stage will run, `arm` need not be
        called."""
        self._launches.begin_batch()
        for bucket in self.buckets:
            bucket.begin_batch(microbatches)

    def arm(self) -> None:
        """The next micro-batch to run backward is the last: buckets are reduced as they become complete."""
        for bucket in self.buckets:
            bucket.arm()

    def start_reduce(self) -> None:
        """Starts every reduction that has not started yet (tied parameters excepted)."""
        for bucket in self.buckets:
            if not bucket.plan.tied and (bucket.opened if bucket.streams else not bucket.launched):
                self._launches.start(bucket)

    def tied_gradients(self) -> list[Tensor]:
        """The gradients to be summed with the other stage that holds the same parameters, before
        `start_tied_reduce`."""
        tied = [b for b in self.buckets if b.plan.tied]
        for bucket in tied:
            bucket.close()
        return [b.full for b in tied]

    def start_tied_reduce(self) -> None:
        """Starts the reduction of the tied parameters."""
        for bucket in self.buckets:
            if bucket.plan.tied:
                self._launches.start(bucket)

    def finish_reduce(self) -> None:
        """Waits for all reductions, then sums over the axes that hold further parts of the gradient."""
        for bucket in self.buckets:
            assert bucket.launched or bucket.streams, "finish_reduce before start_reduce and start_tied_reduce"
            bucket.finish_batch()
            for axis in (self.axes.replicate, *(() if bucket.plan.tied else self.extra_reduce)):
                all_reduce_(bucket.gradient, axis)
        self.scratch.release()
        self._sum_partial_gradients()

    def _sum_partial_gradients(self) -> None:
        """Adds up what each rank of an axis computed a share of: one small message an axis."""
        for axis in self.axes.cut:
            pieces = []
            for bucket in self.buckets:
                for run in bucket.plan.runs:
                    start, stop = max(run.start, bucket.owned_start), min(run.stop, bucket.owned_stop)
                    if axis.name in run.kind.partial and start < stop:
                        pieces.append(bucket.gradient[start - bucket.owned_start : stop - bucket.owned_start])
            if pieces:
                packed = torch.cat(pieces)
                all_reduce_(packed, axis)
                for piece, part in zip(pieces, packed.split([p.numel() for p in pieces]), strict=True):
                    piece.copy_(part)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def attach(self, layers: Sequence[nn.Module], *others: ParameterBuffers) -> None:
        """Hooks the stage's layers (forward order; once per weight version), so that weights are there when used.

        others: the stage's other families. Needed for stage 3, and for gathers of stages 1 and 2 that run behind the
        next forward.
        """
        families = (self, *others)
        known = {key: weights for buffers in families for key, weights in buffers._weights_of.items()}
        used = [dict.fromkeys(known[id(p)] for p in layer.parameters() if id(p) in known) for layer in layers]
        self.unsharder.attach(layers, [list(weights) for weights in used])
        for buffers in families:
            buffers._attached = True

    def gather_weights(self, version: int = 0) -> None:
        """Every rank's slice of the updated weights to every rank (stages 1 and 2); stage 3 forgets the old ones."""
        overlap = self.options.overlap_param_gather and self._attached
        for bucket in reversed(self.buckets):  # the first layers are needed first
            bucket.weights[version].updated(async_op=overlap)

    def wait_weights(self) -> None:
        """Returns when no gather is under way: parameters may be read, and slices written, without a layer's hooks."""
        for bucket in self.buckets:
            for weights in bucket.weights:
                weights.wait()

    def unshard(self) -> None:
        """Gathers all weights and keeps them until `reshard` (breadth-first schedules: once a chunk and batch)."""
        for bucket in reversed(self.buckets):
            for weights in bucket.weights:
                weights.pinned = True
                if not weights.resident:
                    weights.start_gather(async_op=False)
                weights.wait()

    def reshard(self) -> None:
        """Ends `unshard`."""
        for bucket in self.buckets:
            for weights in bucket.weights:
                weights.pinned = False
                weights.free()
        self.unsharder.give_back_all()


def placement_of(name: str, parameter: Tensor) -> Placement:
    """The parameter's `.placement`; a parameter without one is whole, replicated, and decays if it is a matrix."""
    placement: Placement | None = getattr(parameter, "placement", None)
    if placement is None:
        shape = tuple(parameter.shape)
        return Placement(shape, (0,) * len(shape), decay=len(shape) > 1)
    return placement


@torch.no_grad()
def move_parameter(parameter: nn.Parameter, flat: Tensor) -> None:
    """Makes the parameter a view of `flat` (same values, if it has any), the same object as before, with the version
    counter of `flat`."""
    if not parameter.is_meta:
        flat.copy_(parameter.reshape(-1))
    view = nn.Parameter(flat.view(parameter.shape), requires_grad=parameter.requires_grad)
    view.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, view)
