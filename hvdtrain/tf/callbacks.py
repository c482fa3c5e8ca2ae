"""What ranks do together around the steps of `fit`: begin alike, stay alike, save once."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras

from hvdtrain import world
from hvdtrain.errors import UsageError
from hvdtrain.tf.agreement import average_statistics, broadcast, check_same, gather, is_float
from hvdtrain.tf.metrics import ExactMetrics
from hvdtrain.tf.optimizer import as_it_was, is_distributed


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
        _check_alike(self.model, optimizers, self.params)
        # Whole numbers are seeds of dropout: each rank keeps its own.
        variables = [each for each in self.model.variables if is_float(each)]
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


def _check_alike(model: keras.Model, optimizers: list[Any], params: dict[str, Any]) -> None:
    """Refuse what ranks cannot train together. Collective.

    Raises:
        UsageError: on all ranks.
    """
    if not model.built:
        raise UsageError(
            "the model is not built, so its weights cannot be made the same on all ranks: "
            "begin it with keras.Input, or call it on a batch before fit"
        )
    for own in optimizers:
        _check_distributed(own)
    facts = {
        "steps of an epoch": params.get("steps"),
        "epochs": params.get("epochs"),
        "optimizers": [(type(own).__name__, own.built) for own in optimizers],
        "variables": [(variable.path, variable.shape) for variable in model.variables],
    }
    everywhere = gather("about to train", facts)
    for rank, theirs in enumerate(everywhere):
        for name, one in everywhere[0].items():
            if theirs[name] != one:
                both = "" if name == "variables" else f": {theirs[name]} and {one}"
                raise UsageError(
                    f"rank {rank} has other {name} than rank 0{both}; give all ranks the same"
                )


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
            with ExitStack() as stack:
                for own in optimizers_of(self.model):
                    stack.enter_context(as_it_was(own))
                self.model.save(unfinished)
            unfinished.replace(self.path)
