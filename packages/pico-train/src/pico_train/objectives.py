"""What a pass minimises: functions ``(model, batch, step) -> loss``, the mean over the scored tokens of the batch in nats."""

from typing import Protocol

from torch import Tensor, nn

from pico_train.data.batches import Batch


class Objective(Protocol):
    """A loss of one (micro-)batch: the mean over its scored tokens, so that the loop can weight micro-batches by them."""

    def __call__(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """The loss of ``batch`` at pass ``step``: a scalar tensor with a gradient."""
        ...


def next_token(model: nn.Module, batch: Batch, step: int) -> Tensor:
    """Cross-entropy of every token given the tokens before it in its window, in nats."""
    loss: Tensor = model(batch.inputs, labels=batch.labels)
    return loss
