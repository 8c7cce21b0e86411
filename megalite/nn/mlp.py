"""The feed-forward half of a block: up, activation, down."""

from torch import nn

from megalite.config import ModelConfig
from megalite.inventory import mlp
from megalite.microbatch import Microbatch
from megalite.nn.activation import activation_of
from megalite.nn.segment import MakeMessage, Segment
from megalite.parallel.tensor import LayerContext, Message, column_linear, row_linear


class MLP(nn.Module):
    """fc2(activation(fc1(x))), `[s, b, h]` -> `[s, b, h]` (`[s/t, b, h]` under sequence parallelism). width: of the
    layer between, that of the configuration's MLP where none is given.
    """

    def __init__(self, config: ModelConfig, ctx: LayerContext, width: int | None = None) -> None:
        super().__init__()
        up, down = mlp("mlp", config.ffn_size if width is None else width, config)
        self.fc1 = column_linear(up, ctx)
        self.fc2 = row_linear(down, ctx, activation=activation_of(config))
        self.tp, self.split = ctx.tp, ctx.sequence_split

    def segments(self, microbatch: Microbatch, message: MakeMessage = Message) -> list[Segment]:
        """Cut behind its messages: `x` in front of the first, and y behind the last."""
        before, behind, tp, split = message(), message(), self.tp, self.split
        return [
            Segment(lambda x: before.send(x, tp, sequence=split)),
            Segment(lambda x: self.fc1(x, before)),
            Segment(lambda hidden: self.fc2(hidden, behind)),
            Segment(lambda y: behind.receive(y, tp, sequence=split)),
        ]
