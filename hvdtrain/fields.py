"""What a field of a configuration says of its option: help, heading, and what it stands for."""

# Headings of the help, in which options are listed in the order of their fields.
DATA = "model and data"
PLAN = "plan"
LENGTH = "length and batch"
DEVICES = "precision and devices"
OPTIMISATION = "optimisation"
FAULTS = "fault tolerance"
OUTPUT = "output"


def about(
    text: str, group: str = "", metavar: str = "", default: str = "", alias: str = ""
) -> dict[str, str]:
    """Return the metadata of a field that is an option.

    Args:
        text: help, without the default.
        group: heading of the help.
        metavar: word that stands for a value, where its type does not say one.
        default: what holds without the option, in words, where the field's default is None.
        alias: another name of the option, without its dashes.
    """
    return {"help": text, "group": group, "metavar": metavar, "default": default, "alias": alias}
