"""What ranks do together around the steps of `fit`: begin alike, measure exactly, save once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain import world
from hvdtrain.errors import CheckFailed, UsageError
from hvdtrain.tf.optimizer import as_it_was, broadcast, fingerprint, is_distributed


def callbacks(
    *, warmup_epochs: int = 0, save_to: str | Path | None = None
) -> list[keras.callbacks.Callback]:
    """All that a model on several ranks needs; callbacks of your own come after these.

    Args:
        warmup_epochs: the learning rate grows over these from its size-th part to itself.
        save_to: a file ending in .keras that rank 0 writes after each epoch.
    """
    found: list[keras.callbacks.Callback] = [SameWeights(), ExactMetrics()]
    if warmup_epochs:
        found.append(WarmUp(warmup_epochs))
    if save_to is not None:
        found.append(SaveOnFirstRank(save_to))
    return found


def gather(what: str, value: Any) -> list[Any]:
    """Every rank's `value`. Collective.

    Raises:
        CheckFailed: if a rank is at something else.
    """
    told = world.current().gather((what, value))
    for rank, (other, _) in enumerate(told):
        if other != told[0][0]:
            raise CheckFailed(
                f"rank {rank} is {other} while rank 0 is {told[0][0]}: all ranks have to make the "
                "same steps and evaluations, with the same callbacks"
            )
    return [theirs for _, theirs in told]


class SameWeights(keras.callbacks.Callback):
    """All ranks begin with rank 0's variables, and are compared after each epoch.

    Running statistics of batch norm, which each rank takes of its own samples, become their mean
    over the ranks before an evaluation and after each epoch.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Give all ranks rank 0's variables of model and optimizers.

        Raises:
            UsageError: on all ranks, if the model is not built, an optimizer of it averages
                nothing, or ranks train unlike models for unlike numbers of steps.
        """
        if world.current().size == 1:
            return
        optimizers = optimizers_of(self.model)
        if not self.model.built:
            raise UsageError(
                "the model is not built, so its weights cannot be made the same on all ranks: "
                "begin it with keras.Input, or call it on a batch before fit"
            )
        for own in optimizers:
            _check_distributed(own)
        shapes = [(variable.path, variable.shape) for variable in self.model.variables]
        built = [(type(own).__name__, own.built) for own in optimizers]
        facts = (self.params.get("steps"), self.params.get("epochs"), built, shapes)
        for rank, theirs in enumerate(everywhere := gather("about to train", facts)):
            names = ("steps of an epoch", "epochs", "optimizers", "variables")
            for name, one, other in zip(names, everywhere[0], theirs, strict=True):
                if one != other:
                    both = "" if name == "variables" else f": {other} and {one}"
                    raise UsageError(
                        f"rank {rank} has other {name} than rank 0{both}; give all ranks the same"
                    )
        # Whole numbers are seeds of dropout: each rank keeps its own.
        variables = [each for each in self.model.variables if _is_float(each)]
        states = [each for own in optimizers for each in own.variables]
        kept = [each for each in states if "gradient_accumulator" not in each.path]
        broadcast([*variables, *kept])
        if self.model.jit_compile:  # XLA knows no Horovod
            self.model.jit_compile = False
            self.model.make_train_function(force=True)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """All ranks evaluate the same model."""
        average_statistics(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compare the trainable variables.

        Raises:
            CheckFailed: on all ranks, if they differ.
        """
        average_statistics(self.model)
        check_same(self.model.trainable_variables)


def optimizers_of(model: keras.Model) -> list[Any]:
    """Those that a model trains with: its own, or those of its attributes, as a GAN has."""
    own = [each for each in vars(model).values() if isinstance(each, keras.optimizers.Optimizer)]
    others = [each for each in own if each is not model.optimizer]
    return others or [model.optimizer]


def _check_distributed(own: Any) -> None:
    if is_distributed(own):
        return
    if is_distributed(getattr(own, "inner_optimizer", None)):
        raise UsageError(
            "the loss is scaled outside of what averages: give hvdtrain.tf.optimizer a "
            "keras.optimizers.LossScaleOptimizer around your optimizer"
        )
    raise UsageError(
        "the model was compiled with an optimizer that averages nothing: each rank would "
        "train for itself; compile(hvdtrain.tf.optimizer(...))"
    )


def _is_float(variable: keras.Variable) -> bool:
    return bool(tf.as_dtype(variable.dtype).is_floating)


def average_statistics(model: keras.Model) -> None:
    """Give all ranks the mean of what is not trained and no whole number. Collective.

    Only what differs is sent: weights of frozen layers stay as they are.
    """
    here = world.current()
    if here.size == 1:
        return
    variables = [each for each in model.non_trainable_variables if _is_float(each)]
    digests = gather(
        "averaging statistics", [int(fingerprint([each.value])) for each in variables]
    )
    differing = [
        variable
        for variable, *values in zip(variables, *digests, strict=True)
        if len(set(values)) > 1
    ]
    everywhere = gather("averaging statistics", [each.numpy() for each in differing])
    for variable, *values in zip(differing, *everywhere, strict=True):
        variable.assign(np.mean(values, axis=0, dtype=np.float64).astype(values[0].dtype))


def check_same(variables: Sequence[keras.Variable]) -> None:
    """Compare all bits of these variables on all ranks. Collective.

    Raises:
        CheckFailed: on all ranks, if they differ, naming a variable and a rank.
    """
    own = [int(fingerprint([variable.value])) for variable in variables]
    everywhere = gather("comparing weights", own)
    for rank, theirs in enumerate(everywhere):
        different = [
            variable.path
            for variable, mine, other in zip(variables, everywhere[0], theirs, strict=True)
            if mine != other
        ]
        if different:
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise CheckFailed(
                f"rank {rank} holds another {different[0]}{more} than rank 0: load weights on all "
                "ranks or on none, and change none on one rank alone"
            )


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


class WarmUp(keras.callbacks.Callback):
    """The learning rate grows evenly from its size-th part, step by step, to the one given.

    For a rate multiplied by the number of ranks (Goyal et al., "Accurate, Large Minibatch SGD",
    arXiv 1706.02677): training begins with the rate of one rank. The steps count from the first
    epoch of all, so that a `fit` that goes on does not warm up again.
    """

    def __init__(self, epochs: int, ranks: int | None = None) -> None:
        """`ranks` is the number of the world if None."""
        super().__init__()
        self.epochs, self.ranks = epochs, ranks
        self.rate = 0.0
        self.epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Note the rate that is to be reached.

        Raises:
            UsageError: if it follows a schedule, or the number of steps is not known.
        """
        own = self.model.optimizer
        own = getattr(own, "inner_optimizer", own)
        if not isinstance(own._learning_rate, keras.Variable):
            raise UsageError("WarmUp sets the learning rate, and so does the optimizer's schedule")
        if not self.params.get("steps"):
            raise UsageError("WarmUp has to know the steps of an epoch: give fit steps_per_epoch")
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
        """Between epochs, and in what is saved, the rate is the one that was given."""
        if epoch < self.epochs:
            self.model.optimizer.learning_rate = self.rate


class SaveOnFirstRank(keras.callbacks.Callback):
    """Rank 0 writes the model and its optimizer after each epoch, whole or not at all."""

    def __init__(self, path: str | Path) -> None:
        """`path` ends in .keras.

        Raises:
            UsageError: if it does not.
        """
        super().__init__()
        self.path = Path(path)
        if self.path.suffix != ".keras":
            raise UsageError(f"{path}: the name of a saved Keras model ends in .keras")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write beside the old file first: a job that is killed leaves one of them."""
        if world.current().rank == 0:
            unfinished = self.path.with_name(f".unfinished-{self.path.name}")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with as_it_was(self.model.optimizer):
                self.model.save(unfinished)
            unfinished.replace(self.path)
