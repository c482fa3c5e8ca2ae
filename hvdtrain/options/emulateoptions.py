"""The options of an emulation: a run on devices and links that are modelled, not present."""

from dataclasses import dataclass

from hvdtrain.options.fields import Group, Rule, option


@dataclass(frozen=True, kw_only=True)
class EmulateOptions:
    """A run on ranks whose devices and links are modelled."""

    emulate: str | None = option(
        None,
        "rehearse the run on hardware you do not have: ranks sleep for as long as its devices "
        "would compute, and messages take as long as on its links. 8-v100, 8-h200, 16-cpu-10g, "
        "16-cpu-100g or a YAML file, as in plan simulate --cluster; or a file "
        "that --profile has saved: the ranks that it was measured on",
        Group.PLAN,
        Rule.ONE_LINE | Rule.TORCH_ONLY,
        "CLUSTER",
    )
    emulate_dilation: float | None = option(
        None,
        "with --emulate: real seconds per emulated second",
        Group.PLAN,
        Rule.POSITIVE | Rule.ON_RESUME | Rule.TORCH_ONLY | Rule.NOT_COMPARED,
        "D",
        shown_default="enough to hide the overhead of the ranks on these cores",
    )
