"""The configuration of a run: one dataclass, filled from the command line, a YAML file or Python.

How a run trains is decided here alone: nothing else in the package reads the command line for it,
and only `world` reads the environment. The names of the fields are the keys of the YAML file; the
options of the command line are the same names with dashes.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from hvdtrain.errors import UsageError
from hvdtrain.options import decay, injection
from hvdtrain.options.fields import (
    DATA,
    DEFAULT_EPOCHS,
    DEVICES,
    FAULTS,
    LENGTH,
    OPTIMISATION,
    OUTPUT,
    PLAN,
    about,
    check_ranges,
    check_together,
    flag,
    interval,
)
from hvdtrain.options.frameworks import check_framework
from hvdtrain.options.planrequest import PlanRequest, parse_plan_request

Precision = Literal["fp32", "bf16", "fp64"]
Device = Literal["cpu", "cuda"]
MOST_RANKS = 2**20  # upper bound where only the launcher knows the number of ranks


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    Raises:
        UsageError: from `check`, if a value is out of range or two values exclude each other.
    """

    model: str = field(
        metadata=about(
            "cnn, resnet18, resnet50, vit_tiny, vit_b16, or package.module:function of your own",
            DATA,
            "NAME",
        )
    )
    framework: Literal["torch", "tensorflow"] = field(
        default="torch", metadata=about("torch, or tensorflow: Keras 3, data parallel", DATA)
    )
    data: str = field(
        metadata=about("folder of a packed data set (hvdtrain data pack)", DATA, "DIR")
    )
    stage: str | None = field(
        default=None,
        metadata=about(
            "copy the data set into this folder on each host's own disk first, and check the "
            "copy; $VARIABLES are those of the host",
            DATA,
            "DIR",
        ),
    )
    plan: str | None = field(
        default=None,
        metadata=about(
            "single, dp, mp, hp:SxR (S stages of R replicas), auto (measured and chosen before "
            "training), adaptive (also replanned during training), or a JSON file; with "
            "tensorflow single, dp, or mirrored[:N] (MirroredStrategy on N devices of one "
            "process)",
            PLAN,
            default="single on one rank, dp on more",
        ),
    )
    ranks: int | None = field(
        default=None,
        metadata=about(
            "start this many ranks on this machine",
            PLAN,
            default="as many as the launcher started, else 1",
        ),
    )
    epochs: int | None = field(
        default=None,
        metadata=about(
            "passes over the training set",
            LENGTH,
            default=f"{DEFAULT_EPOCHS}, or what --max-steps takes",
        ),
    )
    max_steps: int | None = field(
        default=None, metadata=about("stop after this many steps", LENGTH)
    )
    batch_size: int = field(
        default=64, metadata=about("images per step, over all ranks together", LENGTH)
    )
    microbatches: int | None = field(
        default=None,
        metadata=about(
            "gradient accumulation: micro-batches that each step is cut into, with one forward "
            "and one backward pass each",
            LENGTH,
            default="that of the plan file, else 1, or 4 per stage where there are several",
            alias="accumulate",
        ),
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] | None = field(
        default=None,
        metadata=about(
            "order of forward and backward passes in a pipeline",
            PLAN,
            default="that of the plan file, else 1f1b",
        ),
    )
    verify: bool = field(
        default=False,
        metadata=about(
            "before the first step, compare three steps under the plan with three steps on one "
            "rank and the same data: gradients, updates, statistics; end the run if they differ",
            PLAN,
        ),
    )
    memory_limit: float | None = field(
        default=None,
        metadata=about("GiB that the process of a rank may use, under --plan auto", PLAN, "GIB"),
    )
    profile: str | None = field(
        default=None,
        metadata=about(
            "file with the measurements of --plan auto: read if it exists, else written",
            PLAN,
            "FILE",
        ),
    )
    precision: Precision = field(
        default="fp32", metadata=about("bf16: autocast with fp32 weights", DEVICES)
    )
    optimizer: Literal["sgd", "adam", "adamw"] = field(
        default="adam", metadata=about("sgd: with Nesterov momentum", OPTIMISATION)
    )
    lr: float = field(default=0.001, metadata=about("learning rate, used as given", OPTIMISATION))
    lr_base_batch: int | None = field(
        default=None,
        metadata=about(
            "scale the learning rate by batch size / N (Goyal et al., arXiv 1706.02677)",
            OPTIMISATION,
        ),
    )
    lr_schedule: Literal["constant", "cosine", "step"] = field(
        default="constant",
        metadata=about(
            "constant; cosine to zero; or step: divided by 10 at 50 % and at 75 % of the run",
            OPTIMISATION,
        ),
    )
    warmup_epochs: float = field(
        default=0.0, metadata=about("epochs of linear warm-up from zero", OPTIMISATION)
    )
    momentum: float = field(default=0.9, metadata=about("momentum of sgd", OPTIMISATION))
    weight_decay: float = field(default=0.0, metadata=about("weight decay", OPTIMISATION))
    no_decay: str = field(
        default="norm,bias,position",
        metadata=about(
            "parameters without weight decay: norm (scales and shifts of normalisation layers), "
            "bias, position (position embeddings and class tokens), or none",
            OPTIMISATION,
            "KINDS",
        ),
    )
    label_smoothing: float = field(
        default=0.0,
        metadata=about(
            "share of each target that is spread over all classes, 0 to below 1", OPTIMISATION
        ),
    )
    clip_norm: float | None = field(
        default=None,
        metadata=about("scale gradients down to this norm over the whole model", OPTIMISATION),
    )
    gradient_limit: float | None = field(
        default=None,
        metadata=about("a step whose gradients have a larger norm than this is bad", FAULTS),
    )
    on_bad_step: Literal["stop", "skip"] = field(
        default="stop",
        metadata=about(
            "if loss or gradients are not finite, or above --gradient-limit: stop with the name "
            "of the component, or skip the step",
            FAULTS,
        ),
    )
    batch_norm: Literal["local", "sync"] = field(
        default="local",
        metadata=about(
            "local: over a replica's share of a micro-batch; sync: over the whole micro-batch",
            PLAN,
        ),
    )
    change_batch_norm: bool = field(
        default=False,
        metadata=about(
            "let --plan adaptive change shares and micro-batches, and with them the samples that "
            "batch norm normalises together",
            PLAN,
        ),
    )
    recompute: str | None = field(
        default=None,
        metadata=about(
            "components that keep no activations and repeat the forward pass during the backward "
            "pass: names or patterns with commas, such as 'layer1.*,layer2.*', or all",
            PLAN,
            "COMPONENTS",
        ),
    )
    holdout: float = field(
        default=0.0,
        metadata=about("share of the training set held out as validation, 0 to 0.9", DATA),
    )
    augment: Literal["none", "crop-flip"] = field(
        default="none", metadata=about("crop-flip: random crops and flips", DATA)
    )
    cutout: int | None = field(
        default=None,
        metadata=about("side in pixels of a square that is blanked in each training image", DATA),
    )
    normalise: Literal["meanstd", "split", "unit"] = field(
        default="meanstd",
        metadata=about(
            "meanstd: per channel, of the images trained on; split: of held-out images too; "
            "unit: pixels / 255",
            DATA,
        ),
    )
    image_size: int | None = field(
        default=None,
        metadata=about("image size of the model", DATA, default="that of the data set"),
    )
    patch_size: int | None = field(
        default=None,
        metadata=about(
            "patch size of a vision transformer", DATA, default="4 up to 64 pixels, else 16"
        ),
    )
    weights: str | None = field(
        default=None,
        metadata=about(
            "start from the weights in this file (torchvision's names; hvdtrain export writes "
            "one); a last layer for other classes is initialised",
            DATA,
            "FILE",
        ),
    )
    compile: bool = field(
        default=False,
        metadata=about("compile each component with torch.compile (takes minutes)", DEVICES),
    )
    device: Device | None = field(
        default=None, metadata=about("device to train on", DEVICES, default="cuda if there is one")
    )
    threads: int | None = field(
        default=None,
        metadata=about("threads per rank", DEVICES, default="the rank's share of the cores"),
    )
    allreduce: Literal["ring", "auto"] = field(
        default="auto",
        metadata=about(
            "ring: request the MPI library's ring algorithm; auto: let the library choose", DEVICES
        ),
    )
    seed: int = field(
        default=0,
        metadata=about("seed of the weights, sample order, augmentation and hold-out", DATA),
    )
    log_every: int = field(
        default=20, metadata=about("steps between two step lines of metrics.jsonl", OUTPUT)
    )
    eval_every: int = field(
        default=1,
        metadata=about(
            "epochs between two evaluations; the last epoch is always evaluated; 0: never "
            "evaluate, for timing",
            OUTPUT,
        ),
    )
    stall_timeout: float = field(
        default=300.0,
        metadata=about(
            "end the job if an action of a step takes longer than this (ten times this with "
            "--compile)",
            FAULTS,
            "SECONDS",
        ),
    )
    trace: str | None = field(
        default=None,
        metadata=about(
            "write what all ranks did in the first 20 steps as a Chrome trace", OUTPUT, "FILE"
        ),
    )
    run: str | None = field(
        default=None,
        metadata=about(
            "run folder", OUTPUT, "DIR", default="a new one in runs/, by time and model"
        ),
    )
    resume: bool | Literal["auto"] = field(
        default=False,
        metadata=about(
            "resume the run in the run folder from its last checkpoint; auto: resume if the "
            "folder holds a run, else start one",
            FAULTS,
        ),
    )
    checkpoint_every: str = field(
        default="1 epoch",
        metadata=about(
            "save every 'N epochs', or after each epoch and also every 'N steps' or 'N minutes'",
            FAULTS,
            "INTERVAL",
        ),
    )
    keep_checkpoints: int = field(
        default=2, metadata=about("newest checkpoints to keep, besides the best one", FAULTS)
    )
    replicate: str | None = field(
        default=None,
        metadata=about(
            "keep a second copy of each checkpoint file in this folder on another host's own "
            "disk, and resume from it if the first one is lost",
            FAULTS,
            "DIR",
        ),
    )
    restarts: int = field(
        default=0,
        metadata=about(
            "restart from the last checkpoint after a rank failed, up to N times", FAULTS
        ),
    )
    min_ranks: int | None = field(
        default=None,
        metadata=about(
            "with --restarts: restart with one rank fewer each time, down to N",
            FAULTS,
            default="with all ranks",
        ),
    )
    on_alert: str | None = field(
        default=None,
        metadata=about(
            "shell command to run when something goes wrong, with HVDTRAIN_CAUSE, "
            "HVDTRAIN_MESSAGE and HVDTRAIN_RUN in its environment",
            FAULTS,
            "COMMAND",
        ),
    )
    inject: str | None = field(
        default=None,
        metadata=about(
            "inject a fault, for a test: kill, segfault, memory, stop, slow, nan, corrupt, "
            "truncate, fill or replan, such as 'kill step=20 rank=1'",
            FAULTS,
            "FAULT",
        ),
    )
    ledger: str | None = field(
        default=None,
        metadata=about(
            "write a CSV line (epoch,step,rank,sample) for every sample trained on", OUTPUT, "FILE"
        ),
    )

    def check(self) -> "TrainConfig":
        """Return the configuration itself if every value is in range."""
        for item in fields(self):
            if getattr(self, item.name) is None and type(None) not in get_args(item.type):
                raise UsageError(f"{flag(item.name)} must have a value")
        check_ranges(vars(self))
        check_framework(vars(self))
        self.checkpoint_interval()
        decay.parse(self.no_decay)
        if self.inject:
            injection.parse(self.inject, self.ranks or MOST_RANKS)
        check_together(vars(self))
        return self

    @property
    def plan_request(self) -> PlanRequest:
        """Return the parsed value of --plan."""
        return parse_plan_request(self.plan)

    def total_samples(self, epoch_length: int) -> int:
        """Return the samples that the whole run consumes: the lesser by epochs and by steps."""
        limits = []
        if self.epochs is not None or self.max_steps is None:
            limits.append((self.epochs or DEFAULT_EPOCHS) * epoch_length)
        if self.max_steps is not None:
            epochs, steps = divmod(self.max_steps, -(-epoch_length // self.batch_size))
            limits.append(epochs * epoch_length + min(steps * self.batch_size, epoch_length))
        return min(limits)

    def checkpoint_interval(self) -> tuple[float, str]:
        """Return the interval between checkpoints as a number and "epoch", "step" or "minute".

        Raises:
            UsageError: if --checkpoint-every is not such an interval.
        """
        return interval(self.checkpoint_every)

    def learning_rate(self) -> float:
        """Return the peak learning rate, scaled by --lr-base-batch."""
        scale = self.batch_size / self.lr_base_batch if self.lr_base_batch else 1.0
        return self.lr * scale


def field_of_train(name: str) -> Any:
    """Return a field for another dataclass with the default and the help of the `train` option."""
    (item,) = (item for item in fields(TrainConfig) if item.name == name)
    return field(default=item.default, metadata=item.metadata)


def option_names() -> list[str]:
    """Return the command line options of `train`, in order."""
    return [flag(item.name) for item in fields(TrainConfig)]
