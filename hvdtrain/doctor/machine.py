"""Checks of the machine itself: cores, GPUs, shared memory, disk, and the speed of bf16."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain import precision
from hvdtrain.doctor.check import Check

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
        cure = "hvdtrain setup --cuda, or sum through the CPUs: train --reduce-with mpi"
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
        torch.set_num_threads(len(os.sched_getaffinity(0)))
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
    cores, user = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
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
