"""The command line: its parser, its entry point and its exit codes."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, Literal

from hvdtrain import __version__, commands
from hvdtrain.bench.options import LoaderConfig, NetworkConfig, StepConfig
from hvdtrain.config import TrainConfig
from hvdtrain.data.index import Encoding, Resize
from hvdtrain.errors import Interrupted, Preempted, UsageError
from hvdtrain.health import failure
from hvdtrain.host import launchers, output
from hvdtrain.host.process import STOP_SIGNALS
from hvdtrain.jobs.options import JobOptions, SlurmOptions
from hvdtrain.options.parser import SHELLS, Parser, PrintCompletion, add_config, add_dataclass
from hvdtrain.planner.options import PlanConfig
from hvdtrain.setup.run import ABOUT as SETUP
from hvdtrain.setup.run import SetupOptions
from hvdtrain.study.options import PaperBOptions, ReportOptions

# In the order of the help; the function of each in `commands` has its name.
COMMANDS = (
    *("doctor", "setup", "data fetch", "data pack", "data synth", "data verify", "data info"),
    *("train", "evaluate", "predict", "export", "jobs submit", "jobs sweep", "jobs status"),
    *("jobs logs", "jobs cancel", "report", "reproduce paper-a", "reproduce paper-b", "plan show"),
    *("plan simulate", "plan check", "bench step", "bench loader", "bench allreduce"),
    "bench exchange",
)
# Commands that make nothing but their output: the loss of it ends them.
PRINTED = {
    *("data info", "evaluate", "predict", "jobs status", "jobs logs", "plan show"),
    *("plan simulate", *(name for name in COMMANDS if name.startswith("bench"))),
}
PAPER_B = (
    "Compare data, model, hybrid and adaptive parallelism. Writes table I measured here and "
    "predicted for the paper's machine, figures, and verdicts on the claims of arXiv 2503.23186."
)
DIR, DEST, RUN = "DIR", "DEST", "RUN"  # metavars that shell completion treats as paths
RUNS = "run folders, or folders of them"
PLAN_COMMANDS: dict[str, tuple[type, str]] = {
    "show": (PlanConfig, "Show the stages, memory and timeline of a plan."),
    "simulate": (PlanConfig, "Simulate a plan with times measured on this machine."),
    "check": (PlanConfig, "Compare steps under a plan with serial steps."),
}
BENCH_COMMANDS: dict[str, tuple[type, str]] = {
    "step": (StepConfig, "Measure images/s and where the time of a step goes."),
    "loader": (LoaderConfig, "Measure how fast a data set is read, in images/s."),
    "allreduce": (NetworkConfig, "Measure an all-reduce by size and algorithm."),
    "exchange": (NetworkConfig, "Measure a transfer between ranks by size."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its exit code."""
    output.guard()
    try:
        sys.exit(run(sys.argv[1:] if arguments is None else arguments))
    except (Interrupted, Preempted) as stopped:
        # All ranks end this way, after world.stop(). When the first one has ended, srun terminates
        # the others, and schedulers send their signal more than once: ignore these signals.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if launchers.detect(os.environ).rank == 0:
            print(f"hvdtrain: {stopped}", file=sys.stderr, flush=True)
        sys.exit(stopped.exit_code)
    except (Exception, KeyboardInterrupt) as error:
        failure.fail(error)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        parsed = _parser(arguments).parse_args(list(arguments))
    except (OverflowError, ValueError) as error:  # such as a number of thousands of digits
        reason = " ".join(str(error).split())
        raise UsageError(f"an option cannot be understood: {reason}") from None
    name, values = _innermost(parsed.as_dict())
    output.is_the_product = name in PRINTED
    command = getattr(commands, name.replace(" ", "_").replace("-", "_"))
    return int(command(arguments, **values))


def _parser(arguments: Sequence[str] = ()) -> Parser:
    """Return the parser of the command that the arguments start with, or else of all commands.

    Each rank of a job parses its command line, and all options together take 0.1 s.
    """
    parser = Parser(
        prog="hvdtrain",
        description="Train image classifiers on many processes.",
        exit_on_error=True,
    )
    _add_general_options(parser)
    commands = parser.add_subcommands(dest="command")
    first = " ".join(arguments[:1])
    is_known = any(first == name.split()[0] for name in COMMANDS)
    for names, add in (
        ("doctor", _add_doctor),
        ("setup", lambda commands: _add_commands(commands, {"setup": (SetupOptions, SETUP)})),
        ("data", _add_data_commands),
        ("train", _add_train),
        ("evaluate predict export", _add_uses),
        ("jobs", _add_job_commands),
        ("report", _add_report),
        ("reproduce", _add_papers),
        ("plan", _add_plan_commands),
        ("bench", _add_bench_commands),
    ):
        if not is_known or first in names.split():
            add(commands)
    return parser


def _add_general_options(parser: Parser) -> None:
    parser.add_argument(
        "--version",
        action="version",
        version=f"hvdtrain {__version__}",
        help="print the version and exit",
    )
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print the script that completes commands and options in a shell, and exit",
    )


def _group(commands: Any, name: str, text: str) -> Any:
    """Add a command that has commands of its own, and return the object to add these to."""
    group = Parser(description=text)
    commands.add_subcommand(name, group)
    return group.add_subcommands(dest=f"{name}_command")


def _add_doctor(commands: Any) -> None:
    doctor = Parser(description="Check that this machine can train. Each fault comes with a fix.")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument(
        "--job", action="store_true", help="check the ranks of this job, under its launcher"
    )
    commands.add_subcommand("doctor", doctor)


def _add_data_commands(every: Any) -> None:
    commands = _group(every, "data", "Fetch, pack, make, check and describe data sets.")
    fetch = Parser(description="Download CIFAR-10 or CIFAR-100. Resumes, and checks the MD5.")
    fetch.add_argument("name", type=Literal["cifar10", "cifar100"], help="which data set")
    fetch.add_argument("--to", required=True, type=str, metavar=DIR, help="folder for the archive")
    commands.add_subcommand("fetch", fetch)
    commands.add_subcommand("pack", _pack())
    synth = Parser(description="Make a data set that a small model can learn.")
    synth.add_argument("destination", type=str, metavar=DEST, help="new folder for the shards")
    for name, default, text in (
        ("images", None, "training images"),
        ("classes", None, "classes"),
        ("size", 32, "height and width in pixels"),
        ("seed", 0, "seed of the data set"),
        ("shard-mb", 64, "size of a shard in MB"),
    ):
        needed: dict[str, Any] = {"required": True} if default is None else {"default": default}
        synth.add_argument(f"--{name}", type=int, metavar="N", help=text, **needed)
    commands.add_subcommand("synth", synth)
    verify = Parser(description="Check every shard of a data set against its index.")
    verify.add_argument("destination", type=str, metavar=DEST, help="folder of a data set")
    commands.add_subcommand("verify", verify)
    info = Parser(description="Show what a data set holds.")
    info.add_argument("destination", type=str, metavar=DEST, help="folder of a data set")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_subcommand("info", info)


def _pack() -> Parser:
    pack = Parser(
        description="Pack images into HDF5 shards. Resumes after a kill.",
    )
    pack.add_argument(
        "source",
        type=str,
        metavar="SRC",
        help="folder with one folder of images per class, inside train/ and test/ or alone; CSV "
        "file of file and label; .npz file; or official CIFAR archive",
    )
    pack.add_argument("destination", type=str, metavar=DEST, help="new folder for the shards")
    for name, kind, default, metavar, text in (
        ("size", int | None, None, "N", "side in pixels (default: that of the images)"),
        ("resize", Resize, "shorter", None, "scale the shorter side and crop, squash or pad"),
        ("encoding", Encoding, "raw", None, "pixels; jpeg keeps files, decoded while training"),
        ("split", str | None, None, "A,B", "parts for train and test, such as 0.9,0.1"),
        ("seed", int, 0, "N", "chooses the images of the test split"),
        ("workers", int | None, None, "N", "processes that decode (default: one per core)"),
        ("shard-mb", int, 64, "N", "size of a shard in MB"),
    ):
        shown: dict[str, Any] = {"metavar": metavar} if metavar else {}
        pack.add_argument(f"--{name}", type=kind, default=default, help=text, **shown)
    pack.add_argument(
        "--skip-broken", action="store_true", help="leave broken files out, and count them"
    )
    pack.add_argument(
        "--reference",
        action="store_true",
        help="read the inputs of FILE.h5:/inputs,/targets where they are, and copy none",
    )
    return pack


def _add_train(commands: Any) -> None:
    train = Parser(description="Train a model.")
    add_config(train)
    add_dataclass(train, TrainConfig)
    commands.add_subcommand("train", train)


def _add_uses(commands: Any) -> None:
    """Add the commands that use what was trained."""
    evaluate = Parser(description="Evaluate a run's model on a data set, and by class.")
    evaluate.add_argument("run", type=str, metavar=RUN, help="run folder")
    evaluate.add_argument(
        "--data", type=str | None, metavar=DIR, help="packed data set (default: that of the run)"
    )
    evaluate.add_argument(
        "--split", type=str, default="test", metavar="NAME", help="split to evaluate"
    )
    evaluate.add_argument(
        "--to",
        type=str | None,
        metavar=DIR,
        help="folder for evaluation.json, classes.csv, confusion.csv and confusion.png",
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    predict = Parser(description="Print the classes of image files, by a run's model.")
    predict.add_argument("run", type=str, metavar=RUN, help="run folder")
    predict.add_argument("images", type=str, nargs="+", metavar="IMAGE", help="image file")
    predict.add_argument(
        "--format", type=Literal["csv", "jsonl"], default="csv", help="CSV, or JSON lines"
    )
    predict.add_argument("--top", type=int, default=1, metavar="K", help="classes per image")
    predict.add_argument(
        "--resize",
        type=Resize | None,
        help="how images get the model's size (default: as in the data set, else shorter)",
    )
    export = Parser(description="Write a run's model or weights for other programs.")
    export.add_argument("run", type=str, metavar=RUN, help="run folder")
    export.add_argument(
        "file",
        type=str,
        metavar="FILE",
        help="file to write: .pth or .pt (weights with torchvision's names), .onnx, or .pt2 "
        "(torch.export)",
    )
    for name, command in (("evaluate", evaluate), ("predict", predict), ("export", export)):
        command.add_argument(
            "--which", type=Literal["best", "last"], default="best", help="which checkpoint"
        )
        command.add_argument(
            "--trust",
            action="store_true",
            help="run the model code that the run names, whoever could have written it",
        )
        commands.add_subcommand(name, command)


def _add_job_commands(every: Any) -> None:
    commands = _group(every, "jobs", "Run as jobs of Slurm, and see how they are doing.")
    submit = Parser(description="Submit a run as a job. Takes the options of train too.")
    add_config(submit)
    add_dataclass(submit, JobOptions, "job")
    add_dataclass(submit, TrainConfig)
    commands.add_subcommand("submit", submit)
    sweep = Parser(description="Submit the runs of a study as jobs, or as arrays.")
    sweep.add_argument(
        "study",
        type=str,
        metavar="STUDY",
        help="YAML file; a list as a value means one run per item",
    )
    sweep.add_argument("--to", required=True, type=str, metavar=DIR, help="folder for the runs")
    sweep.add_argument("--dry-run", action="store_true", help="print the scripts, submit nothing")
    add_dataclass(sweep, SlurmOptions, "job")
    commands.add_subcommand("sweep", sweep)
    status = Parser(description="Show the job, progress and state of each run.")
    status.add_argument("runs", type=str, nargs="*", metavar=RUN, help=f"{RUNS} (default: runs)")
    status.add_argument("--json", action="store_true", help="print one JSON list")
    commands.add_subcommand("status", status)
    logs = Parser(description="Print what a rank of a job has printed.")
    logs.add_argument("run", type=str, metavar=RUN, help="run folder")
    logs.add_argument("--rank", type=int, default=0, metavar="N", help="which rank")
    logs.add_argument("--follow", action="store_true", help="continue until the job is over")
    commands.add_subcommand("logs", logs)
    cancel = Parser(description="Cancel the jobs of runs. What they saved stays.")
    cancel.add_argument("runs", type=str, nargs="+", metavar=RUN, help=RUNS)
    commands.add_subcommand("cancel", cancel)


def _add_report(commands: Any) -> None:
    report = Parser(
        description="Write a scaling report of finished runs. Text, HTML, LaTeX, CSV, pictures."
    )
    report.add_argument("runs", type=str, nargs="+", metavar=RUN, help=RUNS)
    report.add_argument("--to", required=True, type=str, metavar=DIR, help="folder for the report")
    add_dataclass(report, ReportOptions)
    commands.add_subcommand("report", report)


def _add_papers(every: Any) -> None:
    commands = _group(every, "reproduce", "Repeat a published experiment, and write its tables.")
    paper = Parser(
        description="Compare one device, MirroredStrategy and Horovod. Writes table 2, "
        "figures 4 and 5 and a verdict on the claim of doi 10.55145/ajest.2026.05.01.009."
    )
    paper.add_argument("--data", required=True, type=str, metavar=DIR, help="packed CIFAR-10")
    paper.add_argument(
        "--to", required=True, type=str, metavar=DIR, help="folder for runs and report"
    )
    for name, default, text in (
        ("epochs", 10, "epochs of each run, as in the paper"),
        ("repeats", 3, "runs of each arm"),
        ("ranks", 2, "ranks, and devices of MirroredStrategy"),
    ):
        paper.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    commands.add_subcommand("paper-a", paper)
    _add_commands(commands, {"paper-b": (PaperBOptions, PAPER_B)})


def _add_plan_commands(every: Any) -> None:
    text = "Look at a plan: which ranks hold what, and when they work."
    _add_commands(_group(every, "plan", text), PLAN_COMMANDS)


def _add_bench_commands(every: Any) -> None:
    text = "Measure what a step costs here, and where its time goes."
    _add_commands(_group(every, "bench", text), BENCH_COMMANDS)


def _add_commands(commands: Any, options: dict[str, tuple[type, str]]) -> None:
    """Add commands whose options are the fields of a dataclass."""
    for name, (config, text) in options.items():
        command = Parser(description=text)
        add_dataclass(command, config)
        commands.add_subcommand(name, command)


def _innermost(parsed: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the full name of the parsed command, and the values of its options."""
    command = parsed["command"]
    values = parsed[command]
    if inner := values.get(f"{command}_command"):
        command, values = f"{command} {inner}", values[inner]
    return command, values
