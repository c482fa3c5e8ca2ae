"""The checks of `hvdtrain doctor`: libraries and their agreement, launchers, threads, GPUs, Slurm.

Doctor itself needs only Python and psutil, whatever else is broken: everything else is examined in
separate processes with a time limit.
"""

import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hvdtrain import launch
from hvdtrain.doctor import libraries, machine
from hvdtrain.doctor.check import Check, is_fit, probe, report_as_json, show
from hvdtrain.host import output

# Launch lines and probes that do not measure time run in parallel.
AT_ONCE = 2
LOG_COMPONENTS = {"OMPI_MCA_coll_base_verbose": "9"}
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclass
class Examination:
    """The results of doctor's checks, and the launch lines that worked."""

    checks: list[Check] = field(default_factory=list)
    lines: dict[str, dict[int, str]] = field(default_factory=dict)


def doctor(as_json: bool = False) -> int:
    """Examine this machine and print the results, with a fix for each fault.

    Args:
        as_json: print one JSON object: `checks` (`name`, `state` ok | note | fault, `text`,
            `cure`), `fit`, and `launch_lines` (by launcher and number of ranks, the start of a
            command line that worked here just now; the options of `train` follow it).

    Returns:
        The exit code: 0 if this machine is fit, 1 if a check failed.
    """
    if as_json:
        examination = examine()
        print(report_as_json(examination.checks, examination.lines))
    else:
        text = "examining libraries, launchers and devices (about 20 s)"
        with output.console().status(text) if sys.stdout.isatty() else nullcontext():
            examination = examine()
        show(examination.checks, examination.lines)
    return 0 if is_fit(examination.checks) else 1


def examine() -> Examination:
    """Run all checks, in about 20 s on two cores."""
    examination = Examination()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        settings = QUIET | machine.PRECISION_ENVIRONMENT
        names = ("torch", "tensorflow", "mpi")
        jobs = [pool.submit(probe, name, extra=settings) for name in names]
        slurm = libraries.find_slurm()
        launcher = libraries.find_launcher()
        examination.checks += [libraries.python_check(), *libraries.build_tool_checks()]
        torch, tensorflow, mpi = (job.result() for job in jobs)
    horovod = torch.facts.get("horovod", {"error": torch.reason})
    for name, package in {"PyTorch": "torch", "NumPy": "numpy", "h5py": "h5py"}.items():
        facts = torch.facts.get(package)
        examination.checks.append(libraries.package_check(name, facts, torch.reason))
    answers = {"torch": torch, "tensorflow": tensorflow}
    plugins = {name: answer.facts.get("horovod", {}) for name, answer in answers.items()}
    loaded = {name: facts for name, facts in plugins.items() if "libraries" in facts}
    examination.checks += [
        libraries.tensorflow_check(tensorflow),
        libraries.mpi4py_check(mpi),
        libraries.horovod_check(horovod),
        libraries.agreement_check(mpi.facts, loaded, launcher, has_srun=slurm.state == "ok"),
    ]
    if launcher.version and "library" in mpi.facts:
        library, _ = libraries.identity(mpi.facts["library"])
        has_threads = mpi.facts["threads"] == "MULTIPLE"  # as Horovod needs it
        numbers = _start_ranks(examination, library, horovod, has_threads)
        if numbers:
            _try_launchers(examination, libraries.inspect_site(launcher), numbers)
    else:
        examination.checks.append(
            Check("all-reduce", "note", "not tried: several ranks cannot start")
        )
    examination.checks += [slurm, *machine.machine_checks(torch.facts)]
    reason = torch.reason or "PyTorch cannot be loaded"
    examination.checks.append(machine.precision_check(torch.facts.get("precision"), reason))
    return examination


def _start_ranks(
    examination: Examination, library: str, horovod: Mapping[str, Any], has_threads: bool
) -> set[int]:
    """Time an all-reduce on 2 ranks with nothing else running, then watch all-reduces on 4 ranks.

    Args:
        horovod: facts of its plugin for PyTorch.
        has_threads: whether several threads may use MPI.

    Returns:
        The numbers of ranks with which training works.
    """
    pair = probe("allreduce", launcher=launch.mpirun(2))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        start = partial(probe, "reductions", launcher=launch.mpirun(4), extra=LOG_COMPONENTS)
        automatic, ring = pool.map(start, ("auto", "ring"))
    tuned = [name for name in os.environ if name.startswith(("OMPI_MCA_coll_", "MPIR_CVAR_ALLR"))]
    examination.checks += machine.allreduce_checks(pair, has_threads and "error" not in horovod)
    examination.checks.append(machine.algorithm_check(pair, automatic, ring, library, tuned))
    without = libraries.is_missing(horovod) or not has_threads
    if not pair.facts.get("mpi_right" if without else "horovod_right"):
        return set()
    return {2, 4} if automatic.facts.get("size") == 4 else {2}


def _try_launchers(examination: Examination, site: libraries.Site, numbers: set[int]) -> None:
    """Try every launch line for these numbers of ranks, and keep those that work."""
    lines = [
        line
        for line in libraries.launch_lines(site)
        if line.ranks in numbers or line.launcher == "srun"
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(libraries.try_line, lines))
    for line, outcome in zip(lines, outcomes, strict=True):
        check = libraries.line_check(line, outcome, site)
        examination.checks.append(check)
        if check.state == "ok":
            by_ranks = examination.lines.setdefault(line.launcher, {})
            by_ranks[line.ranks] = line.command(site.program)
    # hvdtrain's launcher uses the same mpirun as the all-reduces above.
    tried_numbers = sorted(numbers & set(libraries.numbers_of_ranks(site.cores)))
    examination.lines["hvdtrain"] = {
        ranks: libraries.own_line(site, ranks) for ranks in tried_numbers
    }
