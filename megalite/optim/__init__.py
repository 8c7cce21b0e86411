"""Update rules, learning-rate schedules, loss scaling.

Public names: `OPTIMIZERS` (table), `OptimizerSettings`, `LearningRateSchedule`, `WeightDecaySchedule` (pure functions
of consumed samples), `DynamicLossScaler`, `ConstantLossScaler`.

Nothing here knows about ranks: sharding is `parallel/zero`, which hands an update rule flat pieces of the parameters.
Proof: `tests/unit/optim/`.
"""

from megalite.optim.lr_schedule import DecayStyle, LearningRateSchedule, RampStyle, WeightDecaySchedule, WsdStyle
from megalite.optim.optimizers import OPTIMIZERS, OptimizerSettings
from megalite.optim.precision import ConstantLossScaler, DynamicLossScaler, LossScaler
