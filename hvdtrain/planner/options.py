"""Options of the commands that look at a plan, as a dataclass like the configuration of a run."""

from dataclasses import dataclass, field, fields
from typing import Literal

from hvdtrain.config import TrainConfig, field_of_train
from hvdtrain.errors import UsageError
from hvdtrain.options.givenmodel import Model, ModelInConfig
from hvdtrain.options.sections import Device, FixedPrecision, Seam, about


@dataclass(frozen=True, kw_only=True)
class PlanConfig(ModelInConfig):
    """Options of `plan show`, `plan check` and `plan simulate`; they read no data, only shapes."""

    model: Model = field_of_train("model")
    ranks: int = field(
        default=0, metadata=about("ranks of the plan", default="as many as --cluster has")
    )
    plan: str | None = field(
        default=None,
        metadata=about(
            "single, dp, mp, hp:SxR, a JSON file or a run folder, as for train; auto with "
            "--explain or --cluster"
        ),
    )
    batch_size: int = field_of_train("batch_size")
    microbatches: int | None = field_of_train("microbatches")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] | None = field_of_train("schedule")
    precision: FixedPrecision | None = field(
        default=None,
        metadata=about("fp32, tf32, bf16, fp16 or fp64", default="fp64 for check, else fp32"),
    )
    device: Device = field(default="cpu", metadata=about("device of the steps (check)"))
    optimizer: Seam = field_of_train("optimizer")
    lr: float = field_of_train("lr")
    momentum: float = field_of_train("momentum")
    weight_decay: float = field_of_train("weight_decay")
    loss: Model = field_of_train("loss")
    clip_norm: float | None = field_of_train("clip_norm")
    batch_norm: Literal["local", "sync"] = field_of_train("batch_norm")
    recompute: str | None = field_of_train("recompute")
    sync: str = field_of_train("sync")
    compress: str = field_of_train("compress")
    image_size: int = field(default=32, metadata=about("height and width of the images"))
    classes: int = field(default=10, metadata=about("classes, or the outputs of the model"))
    patch_size: int | None = field_of_train("patch_size")
    seed: int = field(default=0, metadata=about("seed of weights and images"))
    save: str | None = field(
        default=None,
        metadata=about("write the plan as a JSON file, which --plan reads", metavar="FILE"),
    )
    trace: str | None = field(
        default=None,
        metadata=about("write the simulated step as a Chrome trace", metavar="FILE"),
    )
    actions: str | None = field(
        default=None,
        metadata=about(
            "write the actions of each rank in order as CSV: one row per rank", metavar="FILE"
        ),
    )
    cluster: str | None = field(
        default=None,
        metadata=about(
            "predict for hardware you do not have: 8-v100, 8-h200, 16-cpu-10g, 16-cpu-100g "
            "or a YAML file (show --explain, simulate)",
            metavar="FILE",
        ),
    )
    objective: Literal["step", "paper", "paper-divided"] = field(
        default="step",
        metadata=about(
            "what --plan auto minimises: the simulated step, or paper B's sum over components as "
            "printed, or with divided work (show --explain)"
        ),
    )
    explain: bool = field(
        default=False, metadata=about("print the components, and why this plan is chosen (show)")
    )
    picture: str | None = field(
        default=None,
        metadata=about(
            "draw as a PNG which ranks hold which component, and its label (show)",
            metavar="FILE",
        ),
    )
    json: bool = field(default=False, metadata=about("print one JSON object"))

    def __post_init__(self) -> None:
        """Take the number of ranks from the cluster, if none is given.

        Raises:
            UsageError: if there is no cluster either.
        """
        super().__post_init__()
        if self.ranks:
            return
        if self.cluster is None:
            raise UsageError("missing: --ranks")
        from hvdtrain.planner import clusters  # loads NumPy

        object.__setattr__(self, "ranks", clusters.load(self.cluster).ranks)

    def training(self, precision: FixedPrecision) -> TrainConfig:
        """Return the configuration of the training run that the plan is for.

        Raises:
            UsageError: if a value is out of range.
        """
        if self.classes < 1:
            raise UsageError(f"--classes must be above 0, not {self.classes}")
        shared = {item.name for item in fields(TrainConfig)} - {"precision", "trace", "data"}
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        kept = {name: value for name, value in values.items() if name in shared}
        return TrainConfig(data="", precision=self.precision or precision, **kept).check()
