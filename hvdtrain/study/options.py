"""The options of a report."""

from dataclasses import dataclass, field

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import about


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The optional parts of a report.

    Raises:
        UsageError: from `check`, if a value is out of range.
    """

    efficiency: float = field(
        default=0.75, metadata=about("efficiency to reach, 0 to 1", metavar="X")
    )
    to_accuracy: float | None = field(
        default=None,
        metadata=about(
            "also the time until this test accuracy, 0 to 1",
            metavar="X",
            default="what all runs expect, if they do",
        ),
    )
    compare: str | None = field(
        default=None,
        metadata=about(
            "runs of another cluster, version or setting: ratios to them by size", metavar="BASE"
        ),
    )

    def check(self) -> "ReportOptions":
        """Return the options themselves if every value is in range."""
        if not 0 < self.efficiency <= 1:
            raise UsageError(f"--efficiency must be above 0 and at most 1, not {self.efficiency}")
        if self.to_accuracy is not None and not 0 < self.to_accuracy <= 1:
            raise UsageError(
                f"--to-accuracy must be above 0 and at most 1, not {self.to_accuracy}"
            )
        return self
