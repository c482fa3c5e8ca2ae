"""Checks of the machine itself: cores, GPUs, memory, disk, bf16, and its all-reduces."""

import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hvdtrain import precision
from hvdtrain.doctor.check import WATCHED_SIZES, Answer, Check
from hvdtrain.host.process import usable_cores

GIB = 2**30
# Docker's default, which is too small for the buffers of several ranks.
SMALL_SHARED_MEMORY = 64 * 2**20
# Waiting threads then use no processor time, which is the quantity measured on CPUs.
PRECISION_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}


def thread_check(cores: int, all_cores: int, set_by_user: str | None) -> Check:
    """Return the check of threads, with the threads per rank for 1, 2 and 4 ranks.

    Args:
        cores: cores that this process may run on.
        all_cores: cores of the machine.
        set_by_user: OMP_NUM_THREADS, None if it is not set.
    """
    name = "threads"
    usable = f"{cores} of {all_cores} cores may be used"
    if set_by_user is None:
        shares = ", ".join(f"{ranks}: {max(1, cores // ranks)}" for ranks in (1, 2, 4))
        return Check(name, "ok", f"{usable}; threads per rank by number of ranks: {shares}")
    first = set_by_user.split(",")[0]
    if not first.isdigit() or int(first) < 1:
        text = f"OMP_NUM_THREADS={set_by_user} is not a valid number of threads"
        return Check(name, "fault", text, "unset OMP_NUM_THREADS")
    text = f"{usable}; OMP_NUM_THREADS={set_by_user} gives every rank {first}"
    if int(first) > cores:
        return Check(
            name, "note", f"{text} threads, more than there are cores", "unset OMP_NUM_THREADS"
        )
    return Check(name, "ok", text)


def gpu_check(
    driver: str, cards: Sequence[str], torch_side: Mapping[str, Any], nccl: bool
) -> Check:
    """Return the check of GPUs as the driver, PyTorch and Horovod see them.

    Args:
        driver: version of the NVIDIA driver, empty if there is none.
        cards: names of the GPUs that the driver sees.
        torch_side: facts of the probe `torch`.
        nccl: whether Horovod was built with NCCL.
    """
    name = "GPUs"
    seen: list[str] = torch_side.get("cuda_devices", [])
    if not cards and not seen:
        return Check(name, "note", "none: training runs on the CPU")
    text = f"{len(cards)} by the NVIDIA driver {driver} ({', '.join(sorted(set(cards)))})"
    if not seen:
        build = torch_side.get("cuda_version")
        why = (
            f"PyTorch is built for CUDA {build} and sees none"
            if build
            else "PyTorch is built for CPUs only"
        )
        cure = "install a PyTorch for CUDA that this driver runs: make setup TORCH_INDEX=URL"
        return Check(name, "note", f"{text}, but {why}", cure)
    text = f"{text}; PyTorch sees {len(seen)} (CUDA {torch_side.get('cuda_version')})"
    if not nccl:
        cure = "nothing: train --reduce-with torch is the default then; or hvdtrain setup --cuda"
        return Check(name, "note", f"{text}; there is no Horovod with NCCL to sum on GPUs", cure)
    return Check(name, "ok", f"{text}; Horovod has NCCL")


def ask_driver() -> tuple[str, list[str]]:
    """Return the version of the NVIDIA driver and the names of its GPUs; empty if missing."""
    try:
        import pynvml
    except ImportError:
        return "", []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return pynvml.nvmlSystemGetDriverVersion(), list(map(pynvml.nvmlDeviceGetName, handles))
    except pynvml.NVMLError:
        return "", []
    finally:
        pynvml.nvmlShutdown()


def space_check(shared_memory: int, shared_free: int, disk_free: int) -> Check:
    """Return the check of shared memory, which ranks of a node use, and of disk; all in bytes."""
    name = "space"
    text = (
        f"/dev/shm {_gib(shared_memory)} ({_gib(shared_free)} free), "
        f"{_gib(disk_free)} free in this folder"
    )
    if shared_free < SMALL_SHARED_MEMORY or shared_memory <= SMALL_SHARED_MEMORY:
        cure = "free /dev/shm, or start the container with --shm-size=2g"
        return Check(name, "note", f"{text}: too little shared memory for several ranks", cure)
    if disk_free < GIB:
        return Check(
            name, "note", f"{text}: too little for run folders", "free some, or use --run DIR"
        )
    return Check(name, "ok", text)


def bf16_speedups() -> dict[str, Any]:
    """Measure the speed-up of bf16 over fp32 on the device and threads of one rank."""
    import torch

    from hvdtrain import device as devices

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(usable_cores()))
    return precision.bf16_speedups(devices.gpu_if_there_is_one(), torch.get_num_threads())


def precision_check(facts: Mapping[str, Any] | None, reason: str) -> Check:
    """Return which precision is faster, and the option for it: information, never a fault.

    Args:
        facts: result of `bf16_speedups`, None if it failed.
        reason: why it failed.
    """
    name = "precision"
    if facts is None:
        return Check(name, "note", f"fp32 and bf16 were not compared: {reason}")
    faster, text = precision.comparison(facts)
    option = f"train --precision {faster}" if faster else "keep the default, --precision fp32"
    return Check(name, "ok", f"{text}: {option}")


def machine_checks(torch_side: Mapping[str, Any]) -> list[Check]:
    """Return all checks of this machine."""
    cores, user = len(usable_cores()), os.environ.get("OMP_NUM_THREADS")
    driver, cards = ask_driver()
    nccl = bool(torch_side.get("horovod", {}).get("nccl"))
    shared = Path("/dev/shm")
    total, _, free = shutil.disk_usage(shared) if shared.exists() else (0, 0, 0)
    return [
        thread_check(cores, os.cpu_count() or cores, user),
        gpu_check(driver, cards, torch_side, nccl),
        space_check(total, free, shutil.disk_usage(Path.cwd()).free),
    ]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


RING = "ring"
HALVES = "exchange of halves (the same as ring and Rabenseifner on 2 ranks)"

# The pieces that each rank added, by rank: [elements, mask of ranks in a, mask of ranks in b].
Trace = Sequence[Sequence[Sequence[int]]]


def name_algorithm(trace: Trace, elements: int) -> str:
    """Name the all-reduce algorithm that adds in these pieces.

    The names are those of Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
    Operations in MPICH (2005). They differ in the number of elements whose final sum each rank
    computes, and in whether partial sums are added to single contributions or to each other.
    """
    ranks = len(trace)
    everyone = (1 << ranks) - 1
    finished = [
        sum(count for count, a, b in pieces if a | b == everyone and a != b) for pieces in trace
    ]
    if all(count == elements for count in finished):
        return "recursive doubling"
    if sorted(finished) == [0] * (ranks - 1) + [elements]:
        return "reduce to one rank, then broadcast"
    share = -(-elements // ranks)
    if sum(finished) != elements or max(finished) > share:
        return "an unknown algorithm"
    if ranks == 2:
        return HALVES
    one_by_one = all(
        min(a.bit_count(), b.bit_count()) == 1 for pieces in trace for _, a, b in pieces
    )
    if not one_by_one:
        return "Rabenseifner (recursive halving)"
    whole = all(len(pieces) == ranks - 1 for pieces in trace)
    return RING if whole else f"{RING} in segments"


def allreduce_checks(answer: Answer, horovod_loads: bool) -> list[Check]:
    """Return the checks of the probe `allreduce`, which summed 1 MB with both libraries."""
    name, facts = "all-reduce", answer.facts
    if "size" not in facts:
        cure = "run hvdtrain setup, which binds launcher, mpi4py and Horovod to one MPI"
        return [Check(name, "fault", f"2 ranks did not start: {answer.reason}", cure)]
    if facts["size"] != 2:
        text = f"the launcher started 2 ranks, but MPI sees {facts['size']}"
        return [Check(name, "fault", text, "use the launcher of the MPI that mpi4py loads")]
    checks = [_sum_check("all-reduce by mpi4py", "mpi", answer)]
    if not horovod_loads:
        text = "not tried, since Horovod cannot be loaded or may not use MPI"
        return [*checks, Check("all-reduce by Horovod", "note", text)]
    checks.append(_sum_check("all-reduce by Horovod", "horovod", answer))
    if checks[-1].state == "ok":
        text, cure = f"did not work: {answer.reason or 'a wrong sum'}", "run hvdtrain setup"
        check = Check(
            "process sets", "fault", text, f"unset HOROVOD_DYNAMIC_PROCESS_SETS, then {cure}"
        )
        if facts.get("process_sets_right"):
            text = "a set was added for each of 2 ranks and gave correct sums"
            check = Check("process sets", "ok", text)
        checks.append(check)
    return checks


def algorithm_check(
    pair: Answer, automatic: Answer, ring: Answer, library: str, chosen_by_user: Sequence[str]
) -> Check:
    """Return which algorithm the MPI library uses, and whether `--allreduce ring` is honoured.

    Args:
        pair: the probe `allreduce` on 2 ranks.
        automatic: the probe `reductions auto` on 4 ranks.
        ring: the probe `reductions ring` on 4 ranks.
        library: name of the MPI library.
        chosen_by_user: variables in the user's environment that tune it.
    """
    name = "all-reduce algorithm"
    for answer in (automatic, ring):
        if any(str(size) not in answer.facts for size in WATCHED_SIZES):
            return Check(name, "note", f"not known: 4 ranks did not run: {answer.reason}")
    by_size = {size: _name(automatic.facts[str(size)], size) for size in WATCHED_SIZES}
    component = chosen_component(automatic.errors)
    chooser = f"{library}{f' (component {component})' if component else ''}"
    by = f"from {', '.join(chosen_by_user)}" if chosen_by_user else "by size and ranks"
    parts = [f"auto, chosen by {chooser} {by}: 4 ranks, {_spell(by_size)}"]
    if "trace" in pair.facts:
        parts.append(f"2 ranks, 1 MB: {name_algorithm(pair.facts['trace'], 2**17)}")
    ring_by_size = {size: _name(ring.facts[str(size)], size) for size in WATCHED_SIZES}
    differing = all(ring.facts[str(size)]["sums"] > 1 for size in WATCHED_SIZES)
    if all(algorithm.startswith(RING) for algorithm in ring_by_size.values()) and differing:
        parts.append("--allreduce ring gives ring at every size")
        return Check(name, "ok", "; ".join(parts))
    parts.append(f"--allreduce ring is NOT honoured: {_spell(ring_by_size)}")
    cure = f"unset {' '.join(chosen_by_user)}" if chosen_by_user else "use --allreduce auto"
    return Check(name, "note", "; ".join(parts), cure)


def chosen_component(errors: str) -> str:
    """Return Open MPI's collective component of MPI_COMM_WORLD: the last one that its log enables.

    Components are enabled in the order of their priority, and each overrides the ones before it.
    """
    component = ""
    for line in errors.splitlines():
        if "new communicator" in line and "MPI_COMM_WORLD" not in line:
            break
        words = line.replace(",", " ").split()
        if "coll:base:comm_select:" in words and words[-1] == "Enabled":
            component = words[words.index("selecting") + 1]
    return component


def _sum_check(name: str, library: str, answer: Answer) -> Check:
    right = answer.facts.get(f"{library}_right")
    if right is None:
        cure = "run hvdtrain setup"
        return Check(name, "fault", f"failed on 2 ranks: {answer.reason}", cure)
    if not right:
        text = "1 MB on 2 ranks gave a WRONG sum"
        cure = "do not train on this machine, and report it with the output of doctor --json"
        return Check(name, "fault", text, cure)
    milliseconds = answer.facts[f"{library}_milliseconds"]
    return Check(name, "ok", f"1 MB of float32 on 2 ranks: correct, {milliseconds:.2f} ms")


def _name(watched: Mapping[str, Any], size: int) -> str:
    return name_algorithm(watched["trace"], size // 8)


def _spell(by_size: Mapping[int, str]) -> str:
    """Return text such as `8 KB: a, 1 MB and 16 MB: b` for algorithms by size in bytes."""
    groups = groupby(by_size.items(), key=lambda item: item[1])
    return ", ".join(
        f"{' and '.join(_size(size) for size, _ in items)}: {name}" for name, items in groups
    )


def _size(size: int) -> str:
    return f"{size >> 20} MB" if size >= 2**20 else f"{size >> 10} KB"
