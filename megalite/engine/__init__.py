"""One engine under training and library: layers as stages, their weights, and what an update does to them.

    layers -> stages (a module a weight version) -> weights.py: buffers, optimizer  <- update.py: REDUCE, NORM, STEP
                                                                                     <- forward.py: no backward

    weights.py     `Weights`: stages, buffers, ties, the axis of the global norm; averages of the masters as weights;
                   the weight versions before the newest, in checkpoints
    update.py      `Updater`: what the actions of a program that concern weights do; finite or skipped, clipping
    versioned.py   state that belongs to weights beside the optimizer's: expert_bias.py, scale_history.py,
                   qk_clip.py
    forward.py     every run without a backward: evaluation, scoring, generation
    rules.py       the update rule of an optimizer, corrected for the age of its gradients
    spikes.py      which gradient norms are out of proportion

`megalite.train` makes the layers of a configuration, `megalite.library` takes a user's; nothing here knows which.

Invariant: gradients are reduced, measured, clipped and applied in one place, whoever asks.
Proof: `tests/equivalence/test_layouts.py`, `test_asynchronous.py`, `test_library.py`.
"""

from megalite.engine.expert_bias import ExpertBias
from megalite.engine.forward import Given, run_forwards
from megalite.engine.qk_clip import QueryKeyClip
from megalite.engine.rules import rule_maker, sharded_maker
from megalite.engine.scale_history import ScaleHistory
from megalite.engine.spikes import SpikeGuard
from megalite.engine.update import Hyperparameters, Updater
from megalite.engine.versioned import VersionedState
from megalite.engine.weights import OLDER, BuiltStages, Ties, Weights, build_weights, norm_axis, quantize_base
