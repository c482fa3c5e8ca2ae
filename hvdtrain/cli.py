"""The command line: one short function a command, in the order of a user's day."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal

from hvdtrain import __version__, failure, launch, launchers, models
from hvdtrain.arguments import Parser, add_dataclass
from hvdtrain.config import TrainConfig
from hvdtrain.errors import CheckFailed, DataError, Interrupted, Preempted, UsageError
from hvdtrain.planner.options import PlanConfig
from hvdtrain.training.stop import StopRequest

PLAN_COMMANDS = {
    "show": "Stages, labels, parameters, memory and the timeline of a plan.",
    "simulate": "The same with times: each rank's work is timed here, the step played through.",
    "check": "One step under the plan against the serial step, gradient by gradient.",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its exit code."""
    try:
        sys.exit(run(sys.argv[1:] if arguments is None else arguments))
    except (Interrupted, Preempted) as stopped:
        # All ranks leave with it in good order, after world.stop().
        if launchers.detect(os.environ).rank == 0:
            print(f"hvdtrain: {stopped}", file=sys.stderr, flush=True)
        sys.exit(stopped.exit_code)
    except (Exception, KeyboardInterrupt) as error:
        failure.fail(error)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    parsed = _parser().parse_args(list(arguments))
    name, values = _innermost(parsed.as_dict())
    return COMMANDS[name](arguments, **values)


def doctor(arguments: Sequence[str], json: bool) -> int:
    """Is this machine fit?"""
    from hvdtrain.doctor import doctor as examine

    return int(examine(as_json=json))


def data_fetch(arguments: Sequence[str], name: str, to: str) -> int:
    """Download an official archive."""
    from hvdtrain import data

    print(data.fetch(name, to))
    return 0


def data_pack(arguments: Sequence[str], source: str, destination: str, shard_mb: int) -> int:
    """Turn official binary files into shards."""
    from hvdtrain import data

    return _say_index(data.pack(source, destination, shard_mb=shard_mb))


def data_synth(
    arguments: Sequence[str],
    destination: str,
    images: int,
    classes: int,
    size: int,
    seed: int,
    shard_mb: int,
) -> int:
    """Make a learnable set from a seed."""
    from hvdtrain import data

    index = data.synth(destination, images, classes, size=size, seed=seed, shard_mb=shard_mb)
    return _say_index(index)


def data_verify(arguments: Sequence[str], destination: str) -> int:
    """Name every bad shard and chunk."""
    from hvdtrain import data

    faults = data.verify(destination)
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(f"{destination}: every shard is good")
    return DataError.exit_code if faults else 0


def data_info(arguments: Sequence[str], destination: str, json: bool) -> int:
    """What a data set holds."""
    from hvdtrain import data

    content = data.info(destination)
    print(_as_json(content) if json else _as_lines(content))
    return 0


def train(arguments: Sequence[str], **values: Any) -> int:
    """Train on the ranks of the launcher, or start --ranks of them here."""
    settings = TrainConfig(**{item.name: values[item.name] for item in fields(TrainConfig)})
    settings.check()
    started = launchers.detect(os.environ)
    launchers.check_pmix(started, os.environ)
    if started.size == 1 and (settings.ranks or 1) > 1:
        from hvdtrain.training.precheck import check_before_launch

        check_before_launch(settings)
        return launch.run(settings.ranks or 1, arguments)
    # Before the seconds in which torch and MPI start: a signal is remembered from here on.
    with StopRequest() as stop:
        from hvdtrain.training.loop import train as run_training

        run_training(settings, stop)
    return 0


def plan_show(arguments: Sequence[str], **values: Any) -> int:
    """What a plan means for a model."""
    _in_one_process("plan show")
    from hvdtrain.training import plancommands

    found = plancommands.show(PlanConfig(**values))
    print(_as_json(found.as_json()) if values["json"] else found.as_text())
    return 0


def plan_simulate(arguments: Sequence[str], **values: Any) -> int:
    """What a plan means for a model, with times measured here."""
    _in_one_process("plan simulate")
    from hvdtrain.training import plancommands

    found = plancommands.simulate(PlanConfig(**values))
    print(_as_json(found.as_json()) if values["json"] else found.as_text())
    return 0


def plan_check(arguments: Sequence[str], **values: Any) -> int:
    """Does a plan compute the gradients of the serial step?"""
    config = PlanConfig(**values)
    started = launchers.detect(os.environ)
    launchers.check_pmix(started, os.environ)
    if started.size == 1 and config.ranks > 1:
        models.check_name(config.model)
        return launch.run(config.ranks, arguments)
    from hvdtrain.training import plancommands

    parity = plancommands.check(config)
    if started.rank == 0:
        names = plancommands.component_names(config)
        as_json = config.json
        print(
            _as_json(plancommands.parity_as_json(parity, names))
            if as_json
            else plancommands.parity_as_text(parity, names),
            flush=True,
        )
    return 0 if parity.is_within else CheckFailed.exit_code


COMMANDS: dict[str, Callable[..., int]] = {
    "doctor": doctor,
    "data fetch": data_fetch,
    "data pack": data_pack,
    "data synth": data_synth,
    "data verify": data_verify,
    "data info": data_info,
    "train": train,
    "plan show": plan_show,
    "plan simulate": plan_simulate,
    "plan check": plan_check,
}


def _parser() -> Parser:
    parser = Parser(
        prog="hvdtrain",
        description="Train image classifiers on many processes.",
        exit_on_error=True,
    )
    parser.add_argument("--version", action="version", version=f"hvdtrain {__version__}")
    commands = parser.add_subcommands(dest="command")
    examine = Parser(description="Check that this machine is fit, with a cure for each fault.")
    examine.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_subcommand("doctor", examine, help="is this machine fit?")
    data = Parser(description="Fetch, pack, make, check and describe data sets.")
    commands.add_subcommand("data", data, help="fetch, pack, synth, verify, info")
    _add_data_commands(data)
    training = Parser(description="Train a model.")
    training.add_argument("--config", action="config", help="YAML file with keys of these options")
    add_dataclass(training, TrainConfig)
    commands.add_subcommand("train", training, help="train a model")
    plan = Parser(description="Look at a plan: which ranks hold what, and when they work.")
    commands.add_subcommand("plan", plan, help="show, check, simulate")
    _add_plan_commands(plan)
    return parser


def _add_data_commands(data: Parser) -> None:
    commands = data.add_subcommands(dest="data_command")
    fetch = Parser(description="Download an official binary archive; resumes, checks the MD5.")
    fetch.add_argument("name", type=Literal["cifar10", "cifar100"], help="cifar10 or cifar100")
    fetch.add_argument("--to", required=True, type=str, help="folder for the archive")
    commands.add_subcommand("fetch", fetch, help="download CIFAR-10 or CIFAR-100")
    pack = Parser(description="Turn an official archive or its binary files into HDF5 shards.")
    pack.add_argument("source", type=str, help="archive, or folder of the binary files")
    pack.add_argument("destination", type=str, help="new folder for the shards")
    pack.add_argument("--shard-mb", type=int, default=64, help="size of a shard in MB")
    commands.add_subcommand("pack", pack, help="turn an archive into shards")
    synth = Parser(description="Make a labelled set that a model can learn, from a seed.")
    synth.add_argument("destination", type=str, help="new folder for the shards")
    synth.add_argument("--images", type=int, required=True, help="training images")
    synth.add_argument("--classes", type=int, required=True, help="classes")
    synth.add_argument("--size", type=int, default=32, help="height and width in pixels")
    synth.add_argument("--seed", type=int, default=0, help="seed of the set")
    synth.add_argument("--shard-mb", type=int, default=64, help="size of a shard in MB")
    commands.add_subcommand("synth", synth, help="make a synthetic set")
    verify = Parser(description="Check every shard and chunk against the index.")
    verify.add_argument("destination", type=str, help="folder of a data set")
    commands.add_subcommand("verify", verify, help="check a data set")
    info = Parser(description="Show what a data set holds.")
    info.add_argument("destination", type=str, help="folder of a data set")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_subcommand("info", info, help="describe a data set")


def _add_plan_commands(plan: Parser) -> None:
    commands = plan.add_subcommands(dest="plan_command")
    for name, text in PLAN_COMMANDS.items():
        command = Parser(description=text)
        add_dataclass(command, PlanConfig)
        commands.add_subcommand(name, command, help=text)


def _innermost(parsed: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The full name of the command that was given, and its own values."""
    command = parsed["command"]
    values = parsed[command]
    if inner := values.get(f"{command}_command"):
        command, values = f"{command} {inner}", values[inner]
    return command, values


def _in_one_process(command: str) -> None:
    if launchers.detect(os.environ).size != 1:
        raise UsageError(
            f"{command} runs in one process: leave the launcher out; --ranks is the plan's"
        )


def _say_index(index: Any) -> int:
    counts = ", ".join(f"{split.count:,} {name}" for name, split in index.splits.items())
    height, width, _ = index.image_shape
    print(f"{index.folder}: {counts}, {index.classes} classes, {height}x{width} pixels")
    for note in index.notes:
        print(f"note: {note}")
    return 0


def _as_json(content: Any) -> str:
    return json.dumps(content, indent=1)


def _as_lines(content: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in content.items())
