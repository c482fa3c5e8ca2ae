"""The options of a report."""

import math
import re
from dataclasses import dataclass, field

from hvdtrain.errors import UsageError
from hvdtrain.options.fields import about

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The optional parts of a report.

    Raises:
        UsageError: from `check`, if a value is out of range, or options exclude each other.
    """

    efficiency: float = field(
        default=0.75, metadata=about("efficiency to reach, 0 to 1", metavar="X")
    )
    price: float | None = field(default=None, metadata=about("price of a core-hour", metavar="X"))
    energy_price: float | None = field(
        default=None, metadata=about("price of a kilowatt-hour", metavar="X")
    )
    co2: str | None = field(
        default=None,
        metadata=about(
            "grams of CO2 of a kilowatt-hour, least and most, such as 50-400", metavar="LOW-HIGH"
        ),
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
        for name, value in (("price", self.price), ("energy-price", self.energy_price)):
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"--{name} must be 0 or more, not {value}")
        if self.to_accuracy is not None and not 0 < self.to_accuracy <= 1:
            raise UsageError(
                f"--to-accuracy must be above 0 and at most 1, not {self.to_accuracy}"
            )
        self.carbon_grams()
        return self

    def carbon_grams(self) -> Range | None:
        """Return the least and the most grams of CO2 of a kilowatt-hour, if they are given."""
        if self.co2 is None:
            return None
        number = r"(\d+(?:\.\d+)?)"
        match = re.fullmatch(rf"{number}(?:-{number})?", self.co2.replace(" ", ""))
        low, high = (float(match[1]), float(match[2] or match[1])) if match else (1.0, 0.0)
        if high < low:
            raise UsageError(
                f"--co2 {self.co2} is not understood: give grams of a kilowatt-hour, least and "
                "most, such as 50-400"
            )
        return low, high
