"""What a run is: one dataclass, filled from the command line, a YAML file or Python.

Nothing else in the package reads the command line, and nothing but `world` reads the environment,
to learn how to train. The names of the fields are the keys of the YAML file; an option of the
command line is the same name with dashes.
"""

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from hvdtrain import injection
from hvdtrain.errors import UsageError
from hvdtrain.frameworks import check_framework
from hvdtrain.ranges import check_ranges, check_together, flag, interval

Precision = Literal["fp32", "bf16", "fp64"]
Device = Literal["cpu", "cuda"]
DEFAULT_EPOCHS = 10
MOST_RANKS = 2**20  # where a launcher knows how many there are


def about(text: str) -> dict[str, str]:
    """The metadata of a field that is an option with this help."""
    return {"help": text}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    Raises:
        UsageError: from `check`, if a value is out of range or two values exclude each other.
    """

    model: str = field(
        metadata=about(
            "cnn, resnet18, resnet50, vit_tiny, vit_b16, or package.module:function of your own"
        )
    )
    framework: Literal["torch", "tensorflow"] = field(
        default="torch", metadata=about("torch, or tensorflow: Keras 3, data parallel")
    )
    data: str = field(metadata={"help": "folder of a packed data set (hvdtrain data pack)"})
    stage: str | None = field(
        default=None,
        metadata=about(
            "copy the data set into this folder of each host's own disk first, checked; "
            "$VARIABLES are those of the host"
        ),
    )
    plan: str | None = field(
        default=None,
        metadata=about(
            "single, dp, mp, hp:SxR (S stages of R replicas), auto (measured and chosen here), "
            "adaptive (and changed while training) "
            "or a JSON file; of tensorflow "
            "single, dp, or mirrored[:N]: MirroredStrategy on N devices of one process; "
            "default: single on one rank, dp on more"
        ),
    )
    ranks: int | None = field(
        default=None,
        metadata=about(
            "start this many ranks on this machine; default: those of the launcher, else 1"
        ),
    )
    epochs: int | None = field(
        default=None,
        metadata=about("passes over the training set; default: 10, or as --max-steps says"),
    )
    max_steps: int | None = field(default=None, metadata=about("end after this many steps"))
    batch_size: int = field(default=64, metadata=about("images a step, over all ranks together"))
    microbatches: int | None = field(
        default=None,
        metadata=about(
            "parts a step is cut into, one forward and backward each; "
            "default: as the plan file says, else 1, or 4 a stage where there are several"
        ),
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] | None = field(
        default=None,
        metadata=about(
            "order of forwards and backwards: gpipe, 1f1b, interleaved or zb-h1; "
            "default: as the plan file says, else 1f1b"
        ),
    )
    memory_limit: float | None = field(
        default=None,
        metadata=about("GiB that a rank may hold, process included, under --plan auto"),
    )
    profile: str | None = field(
        default=None,
        metadata=about(
            "file of what --plan auto measures: read if it is there, written if it is not"
        ),
    )
    precision: Precision = field(
        default="fp32", metadata=about("fp32, bf16 (autocast, fp32 weights) or fp64")
    )
    optimizer: Literal["sgd", "adam", "adamw"] = field(
        default="adam", metadata=about("sgd, adam or adamw")
    )
    lr: float = field(default=0.001, metadata=about("learning rate, used as given"))
    lr_base_batch: int | None = field(
        default=None,
        metadata=about(
            "scale the learning rate by batch size / this (Goyal et al., arXiv 1706.02677)"
        ),
    )
    lr_schedule: Literal["constant", "cosine", "step"] = field(
        default="constant",
        metadata=about(
            "constant; cosine to zero; or step: a tenth at 50 %% and at 75 %% of the run"
        ),
    )
    warmup_epochs: float = field(default=0.0, metadata=about("epochs of linear warm-up from zero"))
    momentum: float = field(default=0.9, metadata=about("momentum of sgd (Nesterov)"))
    weight_decay: float = field(default=0.0, metadata=about("weight decay"))
    label_smoothing: float = field(
        default=0.0,
        metadata=about("part of each target that is spread over all classes, 0 to below 1"),
    )
    clip_norm: float | None = field(
        default=None,
        metadata=about("scale gradients down to this norm, taken over the whole model"),
    )
    gradient_limit: float | None = field(
        default=None,
        metadata=about("a step whose gradients have a larger norm than this is a bad step"),
    )
    on_bad_step: Literal["stop", "skip"] = field(
        default="stop",
        metadata=about(
            "where gradients or loss are no numbers, or above --gradient-limit: stop, naming the "
            "component, or skip the step"
        ),
    )
    batch_norm: Literal["local", "sync"] = field(
        default="local",
        metadata=about(
            "local: over a replica's part of a micro-batch; sync: over the whole micro-batch"
        ),
    )
    recompute: str | None = field(
        default=None,
        metadata=about(
            "components that keep no activations and run forward again in backward: "
            "names or patterns with commas between, such as 'layer1.*,layer2.*', or all"
        ),
    )
    holdout: float = field(
        default=0.0,
        metadata=about("part of the training set held out as validation, 0 to 0.9"),
    )
    augment: Literal["none", "crop-flip"] = field(
        default="none", metadata=about("none or crop-flip")
    )
    cutout: int | None = field(
        default=None,
        metadata=about("side in pixels of a square of each image that is blanked in training"),
    )
    normalise: Literal["meanstd", "unit"] = field(
        default="meanstd",
        metadata=about("meanstd: per channel, of the training set; unit: pixels / 255"),
    )
    image_size: int | None = field(
        default=None, metadata=about("image size of the model; default: that of the data")
    )
    patch_size: int | None = field(
        default=None, metadata=about("patch size of a vision transformer")
    )
    weights: str | None = field(
        default=None,
        metadata=about(
            "start from the weights of this file (torchvision's names; hvdtrain export writes "
            "one); a last layer of other classes starts anew"
        ),
    )
    compile: bool = field(
        default=False,
        metadata=about("compile each component with torch.compile (minutes at the start)"),
    )
    device: Device | None = field(
        default=None, metadata=about("cpu or cuda; default: cuda where there is one")
    )
    threads: int | None = field(
        default=None, metadata=about("threads a rank; default: its share of the cores")
    )
    allreduce: Literal["ring", "auto"] = field(
        default="auto",
        metadata=about("ring: ask the MPI library for its ring algorithm; auto: let it choose"),
    )
    seed: int = field(
        default=0,
        metadata=about("seed of the weights, the sample order, augmentation and hold-out"),
    )
    log_every: int = field(
        default=20, metadata=about("steps from one step line of metrics.jsonl to the next")
    )
    stall_timeout: float = field(
        default=300.0,
        metadata=about(
            "end the job if an action of a step takes longer than this many seconds "
            "(ten times as long with --compile)"
        ),
    )
    trace: str | None = field(
        default=None,
        metadata=about("write what all ranks did in the first 20 steps as a Chrome trace"),
    )
    run: str | None = field(
        default=None, metadata=about("run folder; default: runs/ and a name of time and model")
    )
    resume: bool | Literal["auto"] = field(
        default=False,
        metadata=about(
            "continue the run in the run folder from its last checkpoint; "
            "auto: if the folder holds a run, else start one"
        ),
    )
    checkpoint_every: str = field(
        default="1 epoch",
        metadata=about(
            "save after so many epochs, or besides after each epoch: 'N epochs', 'N steps' or "
            "'N minutes'"
        ),
    )
    keep_checkpoints: int = field(
        default=2, metadata=about("keep so many of the newest checkpoints, and the best one")
    )
    replicate: str | None = field(
        default=None,
        metadata=about(
            "keep a second copy of each part of a checkpoint in this folder of another host's own "
            "disk, and go on from it where the first one is lost"
        ),
    )
    restarts: int = field(
        default=0,
        metadata=about("start again from the last checkpoint, so often, after a rank failed"),
    )
    min_ranks: int | None = field(
        default=None,
        metadata=about(
            "with --restarts: go on with a rank fewer each time, down to so many; "
            "default: with all"
        ),
    )
    on_alert: str | None = field(
        default=None,
        metadata=about(
            "shell command that is run when something goes wrong; it finds HVDTRAIN_CAUSE, "
            "HVDTRAIN_MESSAGE and HVDTRAIN_RUN in its environment"
        ),
    )
    inject: str | None = field(
        default=None,
        metadata=about(
            "make a fault happen, to rehearse: kill, segfault, memory, stop, slow, nan, corrupt, "
            "truncate or fill, such as 'kill step=20 rank=1'"
        ),
    )
    ledger: str | None = field(
        default=None,
        metadata=about("write a CSV line (epoch,step,rank,sample) for every sample trained on"),
    )

    def check(self) -> "TrainConfig":
        """Return the configuration itself if every value is in range."""
        for item in fields(self):
            if getattr(self, item.name) is None and type(None) not in get_args(item.type):
                raise UsageError(f"{flag(item.name)} must have a value")
        check_ranges(vars(self))
        check_framework(vars(self))
        self.checkpoint_interval()
        if self.inject:
            injection.parse(self.inject, self.ranks or MOST_RANKS)
        check_together(vars(self))
        return self

    def total_samples(self, epoch_length: int) -> int:
        """Samples consumed when the run is over: by epochs or by steps, whichever is less."""
        limits = []
        if self.epochs is not None or self.max_steps is None:
            limits.append((self.epochs or DEFAULT_EPOCHS) * epoch_length)
        if self.max_steps is not None:
            epochs, steps = divmod(self.max_steps, -(-epoch_length // self.batch_size))
            limits.append(epochs * epoch_length + min(steps * self.batch_size, epoch_length))
        return min(limits)

    def checkpoint_interval(self) -> tuple[float, str]:
        """How often a checkpoint is due: a number of "epoch", "step" or "minute".

        Raises:
            UsageError: if --checkpoint-every is nothing of the kind.
        """
        return interval(self.checkpoint_every)

    def learning_rate(self) -> float:
        """The peak learning rate, after --lr-base-batch."""
        scale = self.batch_size / self.lr_base_batch if self.lr_base_batch else 1.0
        return self.lr * scale


def option_names() -> list[str]:
    """The command line options of `train`, in order."""
    return [flag(item.name) for item in fields(TrainConfig)]
