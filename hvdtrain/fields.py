"""The metadata of a configuration field that describe its option: help, heading and default."""

# Headings of the help. Under each, options are listed in the order of their fields.
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
        metavar: placeholder for the value, if its type does not imply one.
        default: description of the default, for a field whose default is None.
        alias: another name of the option, without its dashes.
    """
    return {"help": text, "group": group, "metavar": metavar, "default": default, "alias": alias}
