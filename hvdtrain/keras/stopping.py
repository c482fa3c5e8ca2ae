"""The end of training: all ranks stop after the same step."""

from typing import Any

import keras
import numpy as np

from hvdtrain import world
from hvdtrain.host.poll import wait_until
from hvdtrain.keras.ranks import check_same, gather


class StopTogether(keras.callbacks.Callback):
    """Stops all ranks together if callbacks of any rank set `model.stop_training`.

    Keras reads it after the last callback of a step and of an epoch. So this callback takes its
    place behind the user's callbacks: in the hooks of `History`, which Keras puts there. A step
    sends the value, and the next one reads what all ranks sent.
    """

    def __init__(self, period: int = 1) -> None:
        """Communicate after every `period` steps, and after each epoch."""
        super().__init__()
        self.period, self.wanted = period, False
        self.request: Any = None
        self.sent, self.received = np.zeros((2, 1), np.uint8)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Take the place behind the user's callbacks."""
        self.wanted, self.request = False, None
        if world.current().size > 1:
            history = self.model.history
            history.on_train_batch_end = self._after_step
            history.on_epoch_end = self._after_epoch
            # EarlyStopping may have restored weights. Files of rank 0 are complete afterwards.
            history.on_train_end = lambda logs=None: check_same(self.model.trainable_variables)

    def _after_step(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.wanted, self.model.stop_training = self.wanted or self.model.stop_training, False
        if (batch + 1) % self.period == 0:
            self.model.stop_training = self._answer()
            self.sent[0] = self.wanted
            communicator = world.current().communicator
            assert communicator is not None
            self.request = communicator.Iallreduce(self.sent, self.received, world.mpi().MAX)

    def _after_epoch(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        keras.callbacks.History.on_epoch_end(self.model.history, epoch, logs)
        self._answer()  # of the last step, which `wanted` includes
        wanted = self.wanted or self.model.stop_training
        self.model.stop_training = any(gather("ending an epoch", wanted))

    def _answer(self) -> bool:
        """Return whether a rank wanted to stop when this was last sent."""
        if self.request is None:
            return False
        wait_until(self.request.Test)
        self.request = None
        return bool(self.received[0])
