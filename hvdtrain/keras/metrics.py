"""Keras metrics over the samples of all ranks."""

from typing import Any

import keras
import numpy as np

from hvdtrain.keras.agreement import average_statistics, gather


class ExactMetrics(keras.callbacks.Callback):
    """Computes metrics and losses in the logs and history of `fit` over all ranks' samples.

    Keras metrics keep sums and counts. This callback adds them up over the ranks once per epoch,
    so that no result is a mean of means. (A metric whose variables are not sums, such as a
    maximum, becomes wrong.) Place it before callbacks that read the logs. No callback can change
    the results of `model.evaluate`: use `hvdtrain.keras.evaluate` for all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_training: dict[str, Any] = {}
        self.of_test: dict[str, Any] = {}
        self.is_fitting = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forget the metrics of the last epoch."""
        self.is_fitting, self.of_training, self.of_test = True, {}, {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Read the metrics of training first: evaluation uses the same variables."""
        if self.is_fitting:
            self.of_training = exact_metrics(self.model)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Read the metrics of the evaluation."""
        self.of_test = exact_metrics(self.model)
        if logs is not None:
            logs.update(self.of_test)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the metrics of all ranks into the logs of the epoch."""
        results = self.of_training or exact_metrics(self.model)
        if logs is not None:
            logs.update(results)
            logs.update({f"val_{name}": value for name, value in self.of_test.items()})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Note that later evaluations do not belong to an epoch."""
        self.is_fitting = False


def evaluate(model: keras.Model, *data: Any, **options: Any) -> dict[str, Any]:
    """Return the results of `model.evaluate`, with its arguments, over all ranks' samples.

    Running statistics are averaged over the ranks first. Collective.
    """
    average_statistics(model)
    model.evaluate(*data, **options)
    return exact_metrics(model)


def exact_metrics(model: keras.Model) -> dict[str, Any]:
    """Return the model's metrics over all ranks; each rank keeps its own counts. Collective."""
    variables = [variable for metric in model.metrics for variable in metric.variables]
    counts = [variable.numpy() for variable in variables]
    everywhere = gather("adding up metrics", counts)
    for variable, *values in zip(variables, *everywhere, strict=True):
        variable.assign(sum(values[1:], start=values[0]))
    results = {name: np.asarray(value) for name, value in model.get_metrics_result().items()}
    for variable, value in zip(variables, counts, strict=True):
        variable.assign(value)
    return {name: value if value.ndim else float(value) for name, value in results.items()}
