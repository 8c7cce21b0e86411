"""Update rules, learning-rate schedules, loss scaling.

Public names: `OPTIMIZERS` (table), `LearningRateSchedule`, `WeightDecaySchedule` (pure functions of consumed samples),
`LossScaler`, `DynamicLossScaler`, `build_scaler`, `CORRECTIONS` (table of corrections for the `Delay` of gradients:
`staleness.py`). Rules for whole matrices derive from `MatrixRule` (`matrix_rule.py`).

To add one: CONTRIBUTING, "Adding an optimizer".
Nothing here knows about ranks: `parallel/zero` shards, and gives an update rule flat pieces of the parameters.
Proof: `tests/unit/optim/`; of the corrections `tests/equivalence/test_staleness.py`.
"""

from megalite.optim.loss_scaler import DynamicLossScaler, LossScaler, build_scaler
from megalite.optim.lr_schedule import DecayStyle, LearningRateSchedule, RampStyle, WeightDecaySchedule, WsdStyle
from megalite.optim.optimizers import OPTIMIZERS
from megalite.optim.rule import EMA, UpdateRule, pieces
from megalite.optim.staleness import CORRECTIONS, LAST_STEP, Delay
