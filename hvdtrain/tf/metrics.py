"""Metrics of Keras over the samples of all ranks."""

from typing import Any

import keras
import numpy as np

from hvdtrain.tf.agreement import average_statistics, gather


class ExactMetrics(keras.callbacks.Callback):
    """Metrics and losses in the logs and the history of `fit` are those of all ranks' samples.

    Keras's metrics count and add; here what the ranks counted is added up once an epoch, so that
    nothing is the mean of means. (A metric of your own whose variables are not sums, such as a
    maximum, is not right.) Place it before whatever reads the logs. What `model.evaluate` returns
    no callback can change: `hvdtrain.tf.evaluate` is the same over all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_training: dict[str, Any] = {}
        self.of_test: dict[str, Any] = {}
        self.is_fitting = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """A new epoch counts from zero."""
        self.is_fitting, self.of_training, self.of_test = True, {}, {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Take the training's metrics: evaluation uses the same variables."""
        if self.is_fitting:
            self.of_training = exact_metrics(self.model)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Take the evaluation's metrics."""
        self.of_test = exact_metrics(self.model)
        if logs is not None:
            logs.update(self.of_test)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the metrics of all ranks into the logs of the epoch."""
        found = self.of_training or exact_metrics(self.model)
        if logs is not None:
            logs.update(found)
            logs.update({f"val_{name}": value for name, value in self.of_test.items()})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Evaluations after `fit` are not of an epoch."""
        self.is_fitting = False


def evaluate(model: keras.Model, *data: Any, **options: Any) -> dict[str, Any]:
    """The results of `model.evaluate`, with its arguments, over the samples of all ranks.

    Running statistics become their mean over the ranks first. Collective.
    """
    average_statistics(model)
    model.evaluate(*data, **options)
    return exact_metrics(model)


def exact_metrics(model: keras.Model) -> dict[str, Any]:
    """The results of the model's metrics over all ranks, whose own counts stay. Collective."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    own = [variable.numpy() for variable in variables]
    everywhere = gather("adding up metrics", own)
    for variable, *values in zip(variables, *everywhere, strict=True):
        variable.assign(sum(values[1:], start=values[0]))
    found = {name: np.asarray(value) for name, value in model.get_metrics_result().items()}
    for variable, value in zip(variables, own, strict=True):
        variable.assign(value)
    return {name: value if value.ndim else float(value) for name, value in found.items()}
