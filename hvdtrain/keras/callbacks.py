"""Callbacks of `fit` on several ranks: equal weights, exact metrics, one saved file."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain import world
from hvdtrain.engine.agreement import check_alike
from hvdtrain.errors import UsageError
from hvdtrain.keras.losses import MeanLoss, watched_losses
from hvdtrain.keras.optimizer import as_it_was, is_distributed, sums
from hvdtrain.keras.ranks import (
    StopTogether,
    average_statistics,
    broadcast,
    check_same,
    gather,
    is_float,
)


def callbacks(
    *,
    warmup_epochs: int = 0,
    save_to: str | Path | None = None,
    average_every: int | None = None,
) -> list[keras.callbacks.Callback]:
    """Return the callbacks that a model on several ranks needs; put your own after these.

    Args:
        warmup_epochs: epochs in which the learning rate grows from 1/size of itself to itself.
        save_to: a file ending in .keras that rank 0 writes after each epoch.
        average_every: steps after which ranks average their weights, instead of gradients in
            every step: compile the model with an optimizer of Keras, see `LocalSteps`.
    """
    needed: list[keras.callbacks.Callback] = []
    if average_every is not None:
        needed.append(LocalSteps(average_every))
    needed += [SameWeights(is_local=bool(needed)), StopTogether(average_every or 1)]
    needed.append(ExactMetrics())
    if warmup_epochs:
        needed.append(WarmUp(warmup_epochs))
    if save_to is not None:
        needed.append(SaveOnFirstRank(save_to))
    return needed


class SameWeights(keras.callbacks.Callback):
    """Gives all ranks rank 0's variables at the start, and compares them after each epoch.

    Running statistics of batch norm, which each rank computes from its own samples, are averaged
    over the ranks before an evaluation and after each epoch.
    """

    def __init__(self, is_local: bool = False) -> None:
        """Expect an optimizer that averages gradients, or with `is_local` one that does not."""
        super().__init__()
        self.is_local = is_local
        self.losses: list[MeanLoss] = []
        self.is_compared = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Give all ranks rank 0's variables of model and optimizers.

        Raises:
            UsageError: on all ranks, if the model is not built, one of its optimizers averages
                nothing, or ranks train different models or for different numbers of steps.
                The first step raises it for a loss that is not a mean over samples.
        """
        if world.current().size == 1:
            return
        optimizers = optimizers_of(self.model)
        _check_alike(self.model, optimizers, self.params, self.is_local)
        # Integers are seeds of dropout: each rank keeps its own.
        variables = [variable for variable in self.model.variables if is_float(variable)]
        states = [variable for optimizer in optimizers for variable in optimizer.variables]
        kept = [variable for variable in states if "gradient_accumulator" not in variable.path]
        broadcast([*variables, *kept])
        if self.model.jit_compile:  # XLA cannot compile Horovod's operations
            self.model.jit_compile = False
            self.model.make_train_function(force=True)
        self.losses = [] if self.is_local else watched_losses(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compare the number of the epoch, and let the first step compare its losses.

        Raises:
            UsageError: on all ranks, if some ranks restored another epoch than others.
        """
        epochs = gather("starting an epoch", epoch)
        for rank, theirs in enumerate(epochs):
            if theirs != epochs[0]:
                raise UsageError(
                    f"rank {rank} starts with epoch {theirs} and rank 0 with epoch {epochs[0]}: "
                    "use a folder for BackupAndRestore that all hosts share"
                )
        for loss in self.losses:
            loss.is_due.assign(True)
        self.is_compared = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read what the first step of the epoch compared.

        Raises:
            UsageError: on all ranks, if a loss is not a mean over samples on one of them.
        """
        if not self.is_compared:
            faults = gather("comparing losses", [loss.fault() for loss in self.losses])
            if texts := [text for rank_faults in faults for text in rank_faults if text]:
                raise UsageError(texts[0])
        self.is_compared = True

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Average statistics, so that all ranks evaluate the same model."""
        average_statistics(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compare the trainable variables.

        Raises:
            CheckFailed: on all ranks, if they differ.
        """
        average_statistics(self.model)
        check_same(self.model.trainable_variables)


def optimizers_of(model: keras.Model) -> list[Any]:
    """Return a model's optimizers: those in its attributes, as in a GAN, or the compiled one."""
    optimizers = [
        value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)
    ]
    others = [optimizer for optimizer in optimizers if optimizer is not model.optimizer]
    return others or [model.optimizer]


def _check_alike(
    model: keras.Model, optimizers: list[Any], params: dict[str, Any], is_local: bool
) -> None:
    """Refuse models that ranks cannot train together. Collective.

    Raises:
        UsageError: on all ranks.
    """
    if not model.built:
        raise UsageError(
            "the model is not built, so its weights cannot be made the same on all ranks: "
            "start it with keras.Input, or call it on a batch before fit"
        )
    for optimizer in optimizers:
        _check_local(optimizer) if is_local else _check_distributed(optimizer)
    states = ("not built", "built")
    facts = {
        "fit": {"steps per epoch": str(params.get("steps")), "epochs": str(params.get("epochs"))},
        "optimizer": {
            f"class {number}": f"{type(optimizer).__name__}, {states[bool(optimizer.built)]}"
            for number, optimizer in enumerate(optimizers)
        },
        "model": {
            f"variable {number}": f"{variable.path} {variable.shape}"
            for number, variable in enumerate(model.variables)
        },
    }
    check_alike(gather("about to train", facts), "use the same on all ranks")


def _check_distributed(optimizer: Any) -> None:
    if is_distributed(optimizer):
        return
    if is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise UsageError(
            "a LossScaleOptimizer is around hvdtrain.keras.optimizer, so ranks would not agree on "
            "steps that overflow: pass keras.optimizers.LossScaleOptimizer(your optimizer) to "
            "hvdtrain.keras.optimizer"
        )
    raise UsageError(
        "the model was compiled with an optimizer that averages nothing, so each rank would "
        "train alone: use compile(hvdtrain.keras.optimizer(...))"
    )


def _check_local(optimizer: Any) -> None:
    if any(map(is_distributed, (optimizer, getattr(optimizer, "inner_optimizer", None)))):
        raise UsageError(
            "the optimizer averages gradients in every step, so average_every has no use: compile "
            "with your optimizer itself, or leave average_every out"
        )


class LocalSteps(keras.callbacks.Callback):
    """Lets ranks make local steps, and averages weights and optimizer after every `period` steps.

    Local SGD (Stich, ICLR 2019): all ranks count the same, so give them batches of one size. The
    ranks also average before an evaluation and after each epoch. Place it before other callbacks.
    """

    def __init__(self, period: int) -> None:
        """Average after every `period` steps.

        Raises:
            UsageError: if that is not positive.
        """
        super().__init__()
        if period < 1:
            raise UsageError(f"average_every={period} is too small: use at least 1")
        self.period, self.are_apart = period, False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuse averages in the middle of an execution of several steps."""
        if self.period % self.model.steps_per_execution:
            raise UsageError(
                f"average_every={self.period} is not a multiple of steps_per_execution="
                f"{self.model.steps_per_execution}, and Keras calls callbacks after these: "
                "change one of them"
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Average if the step ends a period."""
        self.are_apart = True
        if (batch + 1) % self.period == 0:  # each epoch starts at 0
            self.average()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Average, so that all ranks evaluate the same model."""
        self.average()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average, so that ranks end the epoch with the same model."""
        self.average()

    def average(self) -> None:
        """Average unless there was no step since the last time. Collective."""
        if not self.are_apart or world.current().size == 1:
            return
        self.are_apart = False
        # A product of the learning rate and the number of ranks would not always divide exactly.
        variables = [
            variable
            for variable in (
                *self.model.variables,
                *(v for optimizer in optimizers_of(self.model) for v in optimizer.variables),
            )
            if is_float(variable) and not variable.path.endswith("learning_rate")
        ]
        gather("averaging weights", len(variables))
        values = [variable.value for variable in variables]
        for variable, total in zip(variables, sums(values, "local.steps"), strict=True):
            variable.assign(total / world.current().size)


class WarmUp(keras.callbacks.Callback):
    """Raises the learning rate linearly, per step, from 1/size of its value to its value.

    This is the warm-up for a rate multiplied by the number of ranks (Goyal et al., "Accurate,
    Large Minibatch SGD", arXiv 1706.02677): training starts with the rate of one rank. Steps count
    from epoch 0, so that a `fit` that resumes with `initial_epoch` does not warm up again.
    """

    def __init__(self, epochs: int, ranks: int | None = None) -> None:
        """Warm up over `epochs`; `ranks` is the size of the world if None."""
        super().__init__()
        self.epochs, self.ranks = epochs, ranks
        self.rate = 0.0
        self.epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Note the rate at the end of the warm-up.

        Raises:
            UsageError: if the rate follows a schedule, or the number of steps is not known.
        """
        optimizer = self.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if not isinstance(optimizer._learning_rate, keras.Variable):
            raise UsageError(
                "WarmUp and the optimizer's schedule both set the learning rate: use one of them"
            )
        if not self.params.get("steps"):
            raise UsageError(
                "WarmUp does not know the steps per epoch: pass steps_per_epoch to fit"
            )
        self.rate = float(self.model.optimizer.learning_rate)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the epoch."""
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate of the step."""
        steps = self.params["steps"]
        if self.epoch < self.epochs:
            part = (self.epoch * steps + batch) / (self.epochs * steps)
            ranks = self.ranks or world.current().size
            self.model.optimizer.learning_rate = self.rate * (1 + (ranks - 1) * part) / ranks

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Restore the configured rate, so that files saved between epochs contain it."""
        if epoch < self.epochs:
            self.model.optimizer.learning_rate = self.rate


class SaveOnFirstRank(keras.callbacks.Callback):
    """Saves the model and its optimizer on rank 0 after each epoch, atomically."""

    def __init__(self, path: str | Path) -> None:
        """Save to `path`.

        Raises:
            UsageError: if `path` does not end in .keras.
        """
        super().__init__()
        self.path = Path(path)
        if self.path.suffix != ".keras":
            raise UsageError(
                f"{path} is not a name for a Keras model: use a name ending in .keras"
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write beside the old file, then rename: a killed job leaves the old or the new file."""
        if world.current().rank == 0:
            unfinished = self.path.with_name(f".unfinished-{self.path.name}")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack:
                for optimizer in optimizers_of(self.model):
                    stack.enter_context(as_it_was(optimizer))
                self.model.save(unfinished)
            unfinished.replace(self.path)


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
