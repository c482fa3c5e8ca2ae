"""The configuration of a run: one dataclass, filled from the command line, a YAML file or Python.

How a run trains is decided here alone: nothing else in the package reads the command line for it,
and only `world` reads the environment. The names of the fields are the keys of the YAML file; the
options of the command line are the same names with dashes.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from hvdtrain.options.checks import check_values
from hvdtrain.options.givenmodel import Model, ModelInConfig
from hvdtrain.options.requests import (
    BadStep,
    Chosen,
    PlanRequest,
    Restarts,
    is_adaptive,
    parse_bad_step,
    parse_plan_request,
    parse_restarts,
)
from hvdtrain.options.sections import (
    DEFAULT_EPOCHS,
    DeviceOptions,
    EmulateOptions,
    Group,
    ImageOptions,
    OptimisationOptions,
    Rule,
    SyncOptions,
    option,
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    ModelInConfig, SyncOptions, EmulateOptions, DeviceOptions, OptimisationOptions, ImageOptions
):
    """One training run; in Python `model` may also be the model itself (see `train`).

    Raises:
        UsageError: from `check`, if a value is out of range or two values exclude each other.
    """

    model: Model = option(  # noqa: RUF009
        MISSING,
        "cnn, resnet18, resnet50, vit_tiny or vit_b16 (both frameworks), cct_2, cct_6, "
        "torchvision:NAME or timm:NAME (PyTorch), or "
        "package.module:function of your own",
        Group.DATA,
        Rule.FIRST | Rule.ONE_LINE,
        "NAME",
    )
    framework: Literal["torch", "tensorflow"] = option(
        "torch", "torch, or tensorflow: Keras 3, data parallel", Group.DATA, Rule.FIRST
    )
    data: str = option(
        MISSING,
        "folder of a packed data set (hvdtrain data pack)",
        Group.DATA,
        Rule.FIRST | Rule.ONE_LINE | Rule.ON_RESUME,
        "DIR",
    )
    stage: str | None = option(
        None,
        "copy the data set into this folder on each host's own disk first, and check the "
        "copy; $VARIABLES are those of the host",
        Group.DATA,
        Rule.ONE_LINE | Rule.ON_RESUME,
        "DIR",
    )
    plan: str | None = option(
        None,
        "single, dp, mp, hp:SxR (S stages of R replicas), auto (measured and chosen before "
        "training), adaptive (also replanned during training), both also with a limit for each "
        "rank's process, as auto:12GiB; or a JSON file, or a run folder, for the last "
        "plan of that run; with tensorflow single, dp, or mirrored[:N] (MirroredStrategy on N "
        "devices of one process)",
        Group.PLAN,
        Rule.FIRST | Rule.ON_RESUME | Rule.NOT_COMPARED,
        shown_default="single on one rank, dp on more",
    )
    ranks: int | None = option(
        None,
        "start this many ranks on this machine",
        Group.PLAN,
        Rule.FIRST | Rule.POSITIVE | Rule.ON_RESUME | Rule.NOT_COMPARED,
        shown_default="as many as the launcher started, else 1",
    )
    epochs: int | None = option(
        None,
        "passes over the training set",
        Group.LENGTH,
        Rule.FIRST | Rule.POSITIVE | Rule.ON_RESUME,
        shown_default=f"{DEFAULT_EPOCHS}, or what --max-steps takes",
    )
    max_steps: int | None = option(
        None,
        "stop after this many steps",
        Group.LENGTH,
        Rule.FIRST | Rule.POSITIVE | Rule.ON_RESUME,
    )
    batch_size: int = option(
        64,
        "images per step, over all ranks together",
        Group.LENGTH,
        Rule.FIRST | Rule.POSITIVE | Rule.NOT_COMPARED,
    )
    microbatches: int | None = option(
        None,
        "gradient accumulation: micro-batches that each step is cut into, with one forward "
        "and one backward pass each",
        Group.LENGTH,
        Rule.FIRST | Rule.POSITIVE | Rule.ON_RESUME | Rule.TORCH_ONLY,
        shown_default="that of the plan file, else 1, or 4 per stage where there are several",
        alias="accumulate",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] | None = option(
        None,
        "order of forward and backward passes in a pipeline",
        Group.PLAN,
        Rule.FIRST | Rule.ON_RESUME | Rule.TORCH_ONLY,
        shown_default="that of the plan file, else 1f1b",
    )
    schedule_every: int | None = option(
        None,
        "epochs after which --plan adaptive also profiles and chooses again, as paper B's "
        "algorithm 1 does",
        Group.PLAN,
        Rule.POSITIVE | Rule.ON_RESUME | Rule.TORCH_ONLY,
        shown_default="only when ranks or the network drift",
    )
    verify: bool = option(
        False,
        "before the first step, compare three steps under the plan with three steps on one "
        "rank and the same data: gradients, updates, statistics; end the run if they differ",
        Group.PLAN,
        Rule.FIRST | Rule.ALWAYS | Rule.TORCH_ONLY | Rule.NOT_COMPARED,
    )
    profile: str | None = option(
        None,
        "file with the measurements of --plan auto: read if it exists, else written",
        Group.PLAN,
        Rule.ONE_LINE | Rule.ON_RESUME,
        "FILE",
    )
    on_bad_step: str = option(
        "stop",
        "stop (with the name of the component) or skip: what to do if loss or gradients are not "
        "finite; stop:NORM or skip:NORM: also if the gradients have a larger norm",
        Group.FAULTS,
        Rule.ON_RESUME | Rule.NOT_MIRRORED,
        "WHAT[:NORM]",
    )
    batch_norm: Literal["local", "sync"] = option(
        "local",
        "local: over a replica's share of a micro-batch; sync: over the whole micro-batch",
        Group.PLAN,
        Rule.TORCH_ONLY,
    )
    recompute: str | None = option(
        None,
        "components that keep no activations and repeat the forward pass during the backward "
        "pass: names or patterns with commas, such as 'layer1.*,layer2.*', or all",
        Group.PLAN,
        Rule.ON_RESUME | Rule.TORCH_ONLY,
        "COMPONENTS",
    )
    holdout: float = option(
        0.0,
        "share of the training set held out as validation, 0 to 0.9",
        Group.DATA,
        Rule.FIRST | Rule.HOLDOUT,
    )
    normalise: Literal["meanstd", "split", "unit"] = option(
        "meanstd",
        "meanstd: per channel, of the images trained on; split: of held-out images too; "
        "unit: pixels / 255",
        Group.DATA,
    )
    image_size: int | None = option(
        None,
        "image size of the model: the centre of larger images, or what image files become",
        Group.DATA,
        Rule.POSITIVE,
        shown_default="that of the data set",
    )
    patch_size: int | None = option(
        None,
        "patch size of a vision transformer",
        Group.DATA,
        Rule.POSITIVE | Rule.TORCH_ONLY,
        shown_default="4 up to 64 pixels, else 16",
    )
    weights: str | None = option(
        None,
        "start from the weights in this file (torchvision's names; hvdtrain export writes "
        "one); a last layer for other classes is initialised",
        Group.DATA,
        Rule.FIRST | Rule.ONE_LINE | Rule.ON_RESUME | Rule.TORCH_ONLY,
        "FILE",
    )
    freeze: str | None = option(
        None,
        "parameters that are not trained, by name, with * for any part of a name and commas "
        "between several, such as 'layer1.*,stem.*'",
        Group.DATA,
        Rule.ONE_LINE | Rule.TORCH_ONLY,
        "NAME,...",
    )
    seed: int = option(
        0,
        "seed of the weights, sample order, augmentation and hold-out",
        Group.DATA,
        Rule.FIRST | Rule.NOT_NEGATIVE | Rule.NOT_COMPARED,
    )
    callback: list[str] | None = option(  # noqa: RUF009
        None,
        "package.module:Class of your own, derived from hvdtrain.Callback, that follows the run "
        "on rank 0; may be repeated",
        Group.OUTPUT,
        Rule.ALWAYS | Rule.NOT_COMPARED,
        "CLASS",
        shown_default="none",
    )
    log_every: int = option(
        20,
        "steps between two step lines of metrics.jsonl",
        Group.OUTPUT,
        Rule.POSITIVE | Rule.ALWAYS | Rule.NOT_COMPARED,
    )
    eval_every: int = option(
        1,
        "epochs between two evaluations; the last epoch is always evaluated; 0: never "
        "evaluate, for timing",
        Group.OUTPUT,
        Rule.NOT_NEGATIVE | Rule.ALWAYS,
    )
    stall_timeout: float = option(
        300.0,
        "end the job if an action of a step takes longer than this (ten times this with "
        "--compile)",
        Group.FAULTS,
        Rule.POSITIVE | Rule.ON_RESUME | Rule.NOT_COMPARED,
        "SECONDS",
    )
    trace: str | None = option(
        None,
        "write what all ranks did in the first 20 steps as a Chrome trace",
        Group.OUTPUT,
        Rule.ONE_LINE | Rule.ON_RESUME | Rule.TORCH_ONLY | Rule.NOT_COMPARED,
        "FILE",
    )
    run: str | None = option(
        None,
        "run folder",
        Group.OUTPUT,
        Rule.FIRST | Rule.ONE_LINE | Rule.ALWAYS | Rule.NOT_COMPARED,
        "DIR",
        shown_default="a new one in runs/, by time and model",
    )
    resume: bool | Literal["auto"] = option(
        False,
        "resume the run in the run folder from its last checkpoint; auto: resume if the "
        "folder holds a run, else start one",
        Group.FAULTS,
        Rule.FIRST | Rule.ALWAYS | Rule.NOT_COMPARED,
    )
    checkpoint_every: str = option(
        "1 epoch",
        "save every 'N epochs', or after each epoch and also every 'N steps' or 'N minutes'",
        Group.FAULTS,
        Rule.ON_RESUME,
        "INTERVAL",
    )
    keep_checkpoints: int = option(
        2,
        "newest checkpoints to keep, besides the best one",
        Group.FAULTS,
        Rule.POSITIVE | Rule.ALWAYS | Rule.NOT_COMPARED,
    )
    replicate: str | None = option(
        None,
        "keep a second copy of each checkpoint file in this folder on another host's own "
        "disk, and resume from it if the first one is lost",
        Group.FAULTS,
        Rule.ONE_LINE | Rule.ON_RESUME,
        "DIR",
    )
    restarts: int | str = option(
        0,
        "restart from the last checkpoint after a rank failed, up to N times; N,min-ranks=M: "
        "each time with one rank fewer, down to M, and after 600 s (N,min-ranks=M,grow-after=S: "
        "after S) again with all",
        Group.FAULTS,
        Rule.FIRST | Rule.ON_RESUME | Rule.NOT_COMPARED,
        "N[,min-ranks=M]",
    )
    on_alert: str | None = option(
        None,
        "shell command to run when something goes wrong, with HVDTRAIN_CAUSE, "
        "HVDTRAIN_MESSAGE and HVDTRAIN_RUN in its environment",
        Group.FAULTS,
        Rule.ALWAYS | Rule.NOT_COMPARED,
        "COMMAND",
    )
    inject: str | None = option(
        None,
        "inject a fault, for a test: kill, segfault, memory, stop, slow, nan, corrupt, "
        "truncate, fill or replan, such as 'kill step=20 rank=1'",
        Group.FAULTS,
        Rule.ON_RESUME,
        "FAULT",
    )
    ledger: str | None = option(
        None,
        "write a CSV line (epoch,step,rank,sample) for every sample trained on",
        Group.OUTPUT,
        Rule.ONE_LINE | Rule.ON_RESUME | Rule.NOT_COMPARED,
        "FILE",
    )

    def check(self) -> "TrainConfig":
        """Return the configuration itself if every value is in range."""
        check_values(fields(self), vars(self))
        return self

    @property
    def plan_request(self) -> PlanRequest:
        """Return the parsed value of --plan."""
        return parse_plan_request(self.plan)

    @property
    def is_adaptive(self) -> bool:
        """Return whether the plan may change during training."""
        return is_adaptive(self.plan_request)

    @property
    def memory_gib(self) -> float | None:
        """Return the GiB that the process of a rank may use; None for no limit."""
        request = self.plan_request
        return request.memory_gib if isinstance(request, Chosen) else None

    @property
    def bad_step(self) -> BadStep:
        """Return the parsed value of --on-bad-step."""
        return parse_bad_step(self.on_bad_step)

    @property
    def restart_request(self) -> Restarts:
        """Return the parsed value of --restarts."""
        return parse_restarts(self.restarts)

    def total_samples(self, epoch_length: int) -> int:
        """Return the samples that the whole run consumes: the lesser by epochs and by steps."""
        limits = []
        if self.epochs is not None or self.max_steps is None:
            limits.append((self.epochs or DEFAULT_EPOCHS) * epoch_length)
        if self.max_steps is not None:
            epochs, steps = divmod(self.max_steps, -(-epoch_length // self.batch_size))
            limits.append(epochs * epoch_length + min(steps * self.batch_size, epoch_length))
        return min(limits)

    def learning_rate(self) -> float:
        """Return the peak learning rate, scaled by --lr-base-batch."""
        scale = self.batch_size / self.lr_base_batch if self.lr_base_batch else 1.0
        return self.lr * scale


def field_of_train(name: str) -> Any:
    """Return a field for another dataclass with the default and the help of the `train` option."""
    (item,) = (item for item in fields(TrainConfig) if item.name == name)
    return field(default=item.default, metadata=item.metadata)
