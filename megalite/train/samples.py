"""`--sample-interval`: continuations of some prompts during a run, at whatever layout trains.

The stages are built once more for generation, around the parameters that are there: without sequence parallelism (a
token cannot be split), without recomputation or compilation, and without any copy. With ZeRO-3 a stage's weights are
whole on each rank meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch

from megalite.comm import ParallelMesh, all_gather_json, patiently
from megalite.convert import stop_tokens
from megalite.engine import Updater
from megalite.generation import Generator, ModelParts, Request, Sampling, prompt_ids, read_prompts
from megalite.models import LayerSpec, build_stack, layer_specs
from megalite.nn import LayerStack
from megalite.observe import Record
from megalite.parallel.pipeline import Executor
from megalite.parallel.tensor import LayerContext
from megalite.train.build import boundary_spec, layer_context
from megalite.train.run_state import RunState


class ModelInUse:
    """The model of a run for what generates with it or scores by it, between two iterations: its newest weight version,
    with the values of the masters, which a checkpoint would hold."""

    def __init__(
        self, state: RunState, mesh: ParallelMesh, executor: Executor, updater: Updater, device: torch.device
    ) -> None:
        self.state, self.mesh, self.channel = state, mesh, executor.channel
        self._newest_version, self._device = updater.newest_version, device
        self._specs = {spec.name: spec for spec in layer_specs(state.config.model)}
        self._context = layer_context(state.config, mesh, device, state.model.rows)

    def parts(self) -> ModelParts:
        """The stages of this rank, around the parameters that are there."""
        version, config, model = self._newest_version(), self.state.config, self.state.model
        stages = {}
        for (stage, replica), trained in model.stages.items():
            if replica == 0:
                stack = cast(LayerStack, trained.module(version))
                stages[stage] = share_weights(stack, [self._specs[name] for name in stack.names], self._context)
        boundary, count = boundary_spec(config, self._device).dtype, model.placement.num_stages
        return ModelParts(stages, count, config.model, self._context.cp, boundary, self._device)

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Within the context the weights are the masters', and no part of one is with other ranks only."""
        model = self.state.model
        weights = [made.weights for buffers in model.buffers.values() for made in buffers]
        with model.optimizer.masters_as_weights(self._newest_version()):
            for family in weights:
                family.unshard()
            try:
                yield
            finally:
                for family in weights:
                    family.reshard()


class SampleWriter:
    """Continues the prompts of `--sample-prompts`. Made and called by all ranks of the run.

    Raises DataError and ConfigError for prompts that cannot be read.
    """

    def __init__(self, use: ModelInUse) -> None:
        mesh, config, tokenizer = use.mesh, use.state.config, use.state.tokenizer
        path = config.logging.samples.sample_prompts or ""
        texts = patiently((lambda: read_prompts(path, "`sample_prompts`")) if mesh.world.is_first else None, mesh.world)
        self._texts: list[str] = all_gather_json(texts, mesh.world)[0]
        self._ids = prompt_ids(tokenizer, self._texts, "`sample_prompts`")
        self._use, self._mesh, self._config, self._tokenizer = use, mesh, config, tokenizer
        self._stops = stop_tokens(use.state.origin, tokenizer)
        self._together = mesh.size("ep") > 1
        self._stages, self._replicas = mesh.over("dp", "pp") if self._together else mesh["pp"], mesh["dp"]

    def __call__(self, iteration: int) -> list[Record]:
        """A `"sample"` record for each prompt; its text is None where the logits were not numbers. Collective."""
        generator = Generator(
            self._use.parts(),
            self._mesh.coordinate("pp"),
            self._use.state.model.placement,
            self._use.channel,
            self._stages,
            self._replicas,
            self._together,
            num_choices=self._tokenizer.vocab_size,
        )
        with self._use.whole_weights():
            found = generator.run(
                [Request(number, tuple(ids)) for number, ids in enumerate(self._ids)],
                Sampling(seed=self._config.training.seed),
                max_new_tokens=self._config.logging.samples.sample_tokens,
                stops=self._stops,
                micro_batch_size=self._config.training.micro_batch_size,
            )
        texts = [None if ids is None else self._tokenizer.decode(ids) for ids in found]
        return [
            {"kind": "sample", "iteration": iteration, "prompt": prompt, "text": text}
            for prompt, text in zip(self._texts, texts, strict=True)
        ]


Measures = Callable[[ModelInUse], Callable[[int], list[Record]]]
"""`inference.TaskEvaluator`, or what else makes records of a model."""


def share_weights(trained: LayerStack, specs: list[LayerSpec], ctx: LayerContext) -> LayerStack:
    """The layers of `trained` once more, built with another context, around the same parameters and buffers."""
    stack = build_stack(trained.config, specs, ctx)
    for path, module in stack.named_modules():
        twin = trained.get_submodule(path)
        for name in list(module._parameters):
            module._parameters[name] = twin._parameters[name]
        for name in list(module._buffers):
            module._buffers[name] = twin._buffers[name]
    return stack.eval()
