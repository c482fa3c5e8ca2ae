"""The options of the optimizer, its learning rate and the weights that it averages."""

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import Group, Rule, option
from hvdtrain.options.givenmodel import Model
from hvdtrain.options.texts import number

Seam = Model  # a name on the command line, or any function in Python
OPTIMIZERS = ("sgd", "adam", "adamw")
RATE_SCHEDULES = ("constant", "cosine", "linear", "step")
CROSS_ENTROPY = "cross-entropy"
LOSSES = (CROSS_ENTROPY, "pixel-cross-entropy", "mse", "l1", "binary-cross-entropy")


def smoothing_of(loss: str) -> float | None:
    """Return the label smoothing of `cross-entropy[:SMOOTHING]`; None for another loss.

    Raises:
        UsageError: if it is not 0 or more and below 1.
    """
    name, _, text = loss.partition(":")
    if name != CROSS_ENTROPY:
        return None
    if loss == CROSS_ENTROPY:
        return 0.0
    smoothing = number(text)
    if not 0 <= smoothing < 1:
        raise UsageError(
            f"--loss {loss} is not valid: write {CROSS_ENTROPY}:X with a label smoothing X of 0 "
            "or more and below 1"
        )
    return smoothing


@dataclass(frozen=True, kw_only=True)
class OptimisationOptions:
    """The optimizer, its schedule, and what the run should reach."""

    loss: Seam = option(  # noqa: RUF009
        CROSS_ENTROPY,
        "cross-entropy (with label smoothing: cross-entropy:0.1), pixel-cross-entropy, mse, l1, "
        "binary-cross-entropy (of logits), or package.module:function of your own, from outputs "
        "and targets to a loss per sample",
        Group.OPTIMISATION,
        Rule.ONE_LINE,
        "NAME",
    )
    optimizer: Seam = option(  # noqa: RUF009
        "adam",
        "sgd (with Nesterov momentum), adam, adamw, or module:function of (parameters by name, "
        "lr) that returns a torch.optim.Optimizer",
        Group.OPTIMISATION,
        Rule.FIRST,
        "NAME",
    )
    lr: float = option(
        0.001, "learning rate, used as given", Group.OPTIMISATION, Rule.FIRST | Rule.POSITIVE
    )
    lr_base_batch: int | None = option(
        None,
        "scale the learning rate by batch size / N (Goyal et al., arXiv 1706.02677)",
        Group.OPTIMISATION,
        Rule.POSITIVE,
    )
    lr_schedule: Seam = option(  # noqa: RUF009
        "constant",
        "constant; cosine or linear down to 0; step: divided by 10 at 50 % and at 75 % "
        "of the run; or module:function of the share of the run that is done, which returns a "
        "factor of --lr",
        Group.OPTIMISATION,
        Rule.FIRST,
        "NAME",
    )
    warmup_epochs: float = option(
        0.0,
        "epochs of linear warm-up",
        Group.OPTIMISATION,
        Rule.FIRST | Rule.NOT_NEGATIVE,
    )
    momentum: float = option(0.9, "momentum of sgd", Group.OPTIMISATION, Rule.NOT_NEGATIVE)
    weight_decay: float = option(
        0.0,
        "weight decay of all parameters but norms, biases, position embeddings, class tokens",
        Group.OPTIMISATION,
        Rule.FIRST | Rule.NOT_NEGATIVE,
    )
    clip_norm: float | None = option(
        None,
        "scale gradients down to this norm over the whole model",
        Group.OPTIMISATION,
        Rule.POSITIVE | Rule.NOT_MIRRORED,
    )
    expected: float | None = option(
        None,
        "test accuracy that the run should reach, as a share: it says at its end whether it did",
        Group.OPTIMISATION,
        Rule.SHARE | Rule.ALWAYS | Rule.NOT_COMPARED,
    )
