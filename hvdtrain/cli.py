"""The command line: what it accepts, and how it ends."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, Literal

from hvdtrain import __version__, failure, launchers
from hvdtrain.arguments import Parser, add_dataclass
from hvdtrain.bench.options import LoaderConfig, NetworkConfig, StepConfig
from hvdtrain.commands import COMMANDS
from hvdtrain.config import TrainConfig
from hvdtrain.errors import Interrupted, Preempted, UsageError
from hvdtrain.jobs.options import JobOptions, SlurmOptions
from hvdtrain.planner.options import PlanConfig

PLAN_COMMANDS = {
    "show": "Stages, labels, parameters, memory and the timeline of a plan.",
    "simulate": "The same with times: each rank's work is timed here, the step played through.",
    "check": "One step under the plan against the serial step, gradient by gradient.",
}
BENCH_COMMANDS: dict[str, tuple[type, str]] = {
    "step": (StepConfig, "Images/s, part of the machine's matrix rate, where a step's time goes."),
    "loader": (LoaderConfig, "Images/s that a data set can be fed with."),
    "allreduce": (NetworkConfig, "Seconds of a sum over ranks, by size and algorithm."),
    "exchange": (NetworkConfig, "Seconds of a hand-over from rank to rank, by size."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its exit code."""
    try:
        sys.exit(run(sys.argv[1:] if arguments is None else arguments))
    except (Interrupted, Preempted) as stopped:
        # All ranks leave with it in good order, after world.stop(); srun terminates those that
        # are not gone when the first one is.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if launchers.detect(os.environ).rank == 0:
            print(f"hvdtrain: {stopped}", file=sys.stderr, flush=True)
        sys.exit(stopped.exit_code)
    except (Exception, KeyboardInterrupt) as error:
        failure.fail(error)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        parsed = _parser().parse_args(list(arguments))
    except (OverflowError, ValueError) as error:  # such as a number of thousands of digits
        reason = " ".join(str(error).split())
        raise UsageError(f"an option cannot be understood: {reason}") from None
    name, values = _innermost(parsed.as_dict())
    return COMMANDS[name](arguments, **values)


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
    examine.add_argument(
        "--job", action="store_true", help="look at the ranks of this job, under its launcher"
    )
    commands.add_subcommand("doctor", examine, help="is this machine fit?")
    data = Parser(description="Fetch, pack, make, check and describe data sets.")
    commands.add_subcommand("data", data, help="fetch, pack, synth, verify, info")
    _add_data_commands(data)
    training = Parser(description="Train a model.")
    training.add_argument("--config", action="config", help="YAML file with keys of these options")
    add_dataclass(training, TrainConfig)
    commands.add_subcommand("train", training, help="train a model")
    exporting = Parser(description="Write a run's weights under torchvision's names.")
    exporting.add_argument("run", type=str, help="run folder")
    exporting.add_argument("file", type=str, help="file to write, such as resnet50.pth")
    exporting.add_argument(
        "--which", type=Literal["best", "last"], default="best", help="which checkpoint"
    )
    commands.add_subcommand("export", exporting, help="write a run's weights as a file")
    jobs = Parser(description="Run as jobs of Slurm, and see how they fare.")
    commands.add_subcommand("jobs", jobs, help="submit, sweep, status, logs, cancel")
    _add_job_commands(jobs)
    commands.add_subcommand("report", _report(), help="make a scaling report of runs")
    reproduce = Parser(description="Make the runs of a published experiment, and its tables.")
    commands.add_subcommand("reproduce", reproduce, help="paper-a")
    _add_reproductions(reproduce)
    plan = Parser(description="Look at a plan: which ranks hold what, and when they work.")
    commands.add_subcommand("plan", plan, help="show, check, simulate")
    _add_commands(plan, "plan", {name: (PlanConfig, text) for name, text in PLAN_COMMANDS.items()})
    bench = Parser(description="Measure what a step costs here, and where its time goes.")
    commands.add_subcommand("bench", bench, help="step, loader, allreduce, exchange")
    _add_commands(bench, "bench", BENCH_COMMANDS)
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


def _add_job_commands(jobs: Parser) -> None:
    commands = jobs.add_subcommands(dest="jobs_command")
    submit = Parser(description="Make a run a job; every option of train is one here.")
    submit.add_argument("--config", action="config", help="YAML file with keys of these options")
    add_dataclass(submit, JobOptions)
    add_dataclass(submit, TrainConfig)
    commands.add_subcommand("submit", submit, help="make a run a job")
    sweep = Parser(description="Make every run of a study a job, repeats as arrays.")
    sweep.add_argument("study", type=str, help="YAML file; a list means each of its values")
    sweep.add_argument("--to", required=True, type=str, help="folder for the runs")
    sweep.add_argument("--dry-run", action="store_true", help="print the scripts, submit nothing")
    add_dataclass(sweep, SlurmOptions)
    commands.add_subcommand("sweep", sweep, help="make the runs of a study jobs")
    status = Parser(description="A line for each run: its job, how far it is, how it fares.")
    status.add_argument("runs", type=str, nargs="*", help="run folders, or folders of them; runs")
    status.add_argument("--json", action="store_true", help="print one JSON list")
    commands.add_subcommand("status", status, help="how jobs fare")
    logs = Parser(description="What a rank of a run's newest job has printed.")
    logs.add_argument("run", type=str, help="run folder")
    logs.add_argument("--rank", type=int, default=0, help="which rank")
    logs.add_argument("--follow", action="store_true", help="go on until the job is over")
    commands.add_subcommand("logs", logs, help="what a rank has printed")
    cancel = Parser(description="End the jobs of runs; what was saved stays.")
    cancel.add_argument("runs", type=str, nargs="+", help="run folders, or folders of them")
    commands.add_subcommand("cancel", cancel, help="end jobs")


def _report() -> Parser:
    report = Parser(description="Make a scaling report of finished runs: Markdown, CSV, pictures.")
    report.add_argument("runs", type=str, nargs="+", help="run folders, or folders of them")
    report.add_argument("--to", required=True, type=str, help="folder for the report")
    report.add_argument("--efficiency", type=float, default=0.75, help="that is wanted, 0 to 1")
    report.add_argument("--price", type=float | None, default=None, help="of a core-hour")
    return report


def _add_reproductions(reproduce: Parser) -> None:
    commands = reproduce.add_subcommands(dest="reproduce_command")
    paper = Parser(
        description="One device against MirroredStrategy and Horovod on CIFAR-10 "
        "(doi 10.55145/ajest.2026.05.01.009): table 2, figures 4 and 5, a verdict on the claim."
    )
    paper.add_argument("--data", required=True, type=str, help="packed CIFAR-10")
    paper.add_argument("--to", required=True, type=str, help="folder for runs and report")
    paper.add_argument("--epochs", type=int, default=10, help="of each run; the paper has 10")
    paper.add_argument("--repeats", type=int, default=3, help="runs of each arm")
    paper.add_argument("--ranks", type=int, default=2, help="ranks, and mirrors")
    commands.add_subcommand("paper-a", paper, help="data parallelism on CPUs")


def _add_commands(owner: Parser, name: str, options: dict[str, tuple[type, str]]) -> None:
    """Commands of a command, each with the options of a dataclass."""
    commands = owner.add_subcommands(dest=f"{name}_command")
    for name, (config, text) in options.items():
        command = Parser(description=text)
        add_dataclass(command, config)
        commands.add_subcommand(name, command, help=text)


def _innermost(parsed: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The full name of the command that was given, and its own values."""
    command = parsed["command"]
    values = parsed[command]
    if inner := values.get(f"{command}_command"):
        command, values = f"{command} {inner}", values[inner]
    return command, values
