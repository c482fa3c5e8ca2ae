"""The checks that doctor derives from facts, and the fixes that it suggests."""

import json
import sys
import time
from typing import Any

import pytest

from hvdtrain.doctor import libraries, machine
from hvdtrain.doctor.check import (
    Answer,
    Check,
    Outcome,
    failure,
    is_fit,
    read_facts,
    report_as_json,
    report_as_text,
    run,
    verdict,
)

LIBRARY = "/env/lib/libmpi.so.40"
MPI = {"library": "Open MPI v5.0.11, package: x", "libraries": [LIBRARY], "threads": "MULTIPLE"}
PLUGIN = {"version": "0.28.1", "path": "/h", "libraries": [LIBRARY], "mpi": True, "gloo": True}
OWN = libraries.Launcher(
    "/env/bin/mpirun", "mpirun (Open MPI) 5.0.11", "/env/bin/mpirun", "mpirun (Open MPI) 5.0.11"
)
SITE = libraries.Site(("Open MPI", "5.0.11"), 2, None, "hvdtrain", True, True, True, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mpirun (Open MPI) 5.0.11 Report bugs to x", ("Open MPI", "5.0.11")),
        ("Open MPI v4.1.4, package: Debian OpenMPI", ("Open MPI", "4.1.4")),
        ("HYDRA build details: Version: 4.2.0", ("MPICH", "4.2.0")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 1", ("Intel MPI", "2021.9")),
        ("", ("", "")),
    ],
)
def test_an_mpi_is_known_by_what_it_says_of_itself(text: str, expected: tuple[str, str]) -> None:
    assert libraries.identity(text) == expected


def agreement(
    launcher: libraries.Launcher = OWN,
    plugin: dict[str, Any] = PLUGIN,
    mpi: dict[str, Any] = MPI,
    srun: bool = False,
) -> Check:
    return libraries.agreement_check(mpi, {"torch": plugin}, launcher, has_srun=srun)


def test_three_of_one_mpi_agree() -> None:
    assert agreement().state == "ok"


def test_another_library_or_launcher_is_a_fault_with_a_cure() -> None:
    other = libraries.Launcher("/usr/bin/mpirun", "mpirun (Open MPI) 4.1.4", None, "")
    behind = libraries.Launcher(
        OWN.path, OWN.version, "/usr/bin/mpirun", "mpirun (Open MPI) 4.1.4"
    )
    none = libraries.Launcher(None, "", None, "")
    for check in (
        agreement(plugin=PLUGIN | {"libraries": ["/usr/lib/libmpi.so.40"]}),
        agreement(launcher=other),
        agreement(launcher=behind),
        agreement(launcher=none),
    ):
        assert check.state == "fault"
        assert check.cure
    assert agreement(launcher=behind).cure == 'export PATH="/env/bin:$PATH"'


def test_no_mpirun_in_path_is_a_note_where_there_is_one_beside_python_or_srun() -> None:
    beside = libraries.Launcher(OWN.path, OWN.version, None, "")
    assert agreement(launcher=beside).state == "note"
    assert agreement(launcher=libraries.Launcher(None, "", None, ""), srun=True).state == "note"


def test_libraries_that_are_missing_or_poor_are_faults_with_a_cure() -> None:
    gone = {"error": "ModuleNotFoundError: No module named 'x'"}
    package = {"mpi4py": {"version": "4.1.2", "path": "/m"}}
    for check in (
        libraries.package_check("PyTorch", gone, ""),
        libraries.package_check("PyTorch", None, "it was killed by SIGSEGV"),
        libraries.mpi4py_check(Answer({"mpi4py": gone})),
        libraries.mpi4py_check(Answer(package, "it was killed by SIGABRT")),
        libraries.mpi4py_check(Answer(package | MPI | {"threads": "fewer"})),
        libraries.horovod_check(gone),
        libraries.horovod_check(PLUGIN | {"mpi": False, "nccl": False}),
        libraries.tensorflow_check(Answer({"tensorflow": {"error": "ImportError: y"}})),
    ):
        assert check.state == "fault", check
        assert check.cure
    one_thread = libraries.mpi4py_check(Answer(package | MPI | {"threads": "SERIALIZED"}))
    assert (one_thread.state, "MPI sums the gradients" in one_thread.text) == ("note", True)
    missing = {"error": "ModuleNotFoundError: No module named 'tensorflow'"}
    assert libraries.tensorflow_check(Answer({"tensorflow": missing})).state == "note"


def test_lines_fit_the_mpi_the_cores_the_user_and_the_path() -> None:
    lines = {(line.launcher, line.ranks): line.before for line in libraries.launch_lines(SITE)}
    assert lines == {
        ("horovodrun", 2): "horovodrun -np 2",
        ("mpirun", 2): "mpirun --allow-run-as-root -np 2 --bind-to none",
        ("horovodrun", 4): "horovodrun -np 4",
        ("mpirun", 4): ("mpirun --allow-run-as-root -np 4 --bind-to none --map-by :OVERSUBSCRIBE"),
    }
    large = libraries.Site(("MPICH", "4.2.0"), 16, "/env/bin", "hvdtrain", False, True, True, 8)
    assert [line.command("hvdtrain") for line in libraries.launch_lines(large)] == [
        'env PATH="/env/bin:$PATH" horovodrun -np 2 hvdtrain train',
        'env PATH="/env/bin:$PATH" mpirun -n 2 hvdtrain train',
        'env PATH="/env/bin:$PATH" srun --mpi=pmix hvdtrain train',
    ]
    assert libraries.own_line(large, 2) == "/env/bin/hvdtrain train --ranks 2"


def test_a_line_works_only_if_all_its_ranks_meet_in_one_world() -> None:
    line = libraries.LaunchLine("mpirun", 2, "mpirun -np 2")
    together = Outcome(0, "[1,1]<stdout>: rank 1 of 2.\nrank 0 of 2.\n", "", 9)
    assert libraries.line_check(line, together, SITE).state == "ok"
    apart = libraries.line_check(line, Outcome(0, "rank 0 of 1.\nrank 0 of 1.\n", "", 9), SITE)
    assert apart.state == "fault"
    assert "started 2 ranks in worlds of 1" in apart.text
    hanging = libraries.line_check(line, Outcome(None, "", "", 9), SITE)
    assert hanging.state == "fault"
    assert "hung and was killed after 9 s" in hanging.text
    assert hanging.cure


def test_in_a_slurm_job_horovodrun_may_fail_and_steps_start_all_tasks() -> None:
    line = libraries.LaunchLine("horovodrun", 2, "horovodrun -np 2")
    failed = Outcome(1, "", "All nodes are filled.\n", 9)
    job = libraries.Site(("Open MPI", "5.0.11"), 2, None, "hvdtrain", True, True, True, 8)
    assert libraries.line_check(line, failed, SITE).state == "fault"
    check = libraries.line_check(line, failed, job)
    assert (check.state, "srun" in check.cure) == ("note", True)
    assert libraries.slurm_tasks({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) == 8
    assert libraries.slurm_tasks({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4"}) == 4
    inside = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}
    assert libraries.slurm_tasks(inside) == libraries.slurm_tasks({}) == 0


def test_slurm_without_pmix_is_a_note_that_says_what_to_use() -> None:
    with_pmix = "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\n"
    assert libraries.slurm_check("slurm 23.11", Outcome(0, with_pmix, "", 9)).state == "ok"
    without = libraries.slurm_check("slurm 23.11", Outcome(0, "", "\tnone\n\tpmi2\n", 9))
    assert without.state == "note"
    assert "mpirun" in without.cure
    unset = Outcome(1, "", "srun: fatal: Could not establish a configuration source\n", 9)
    assert "configuration source" in libraries.slurm_check("slurm 23.11", unset).text
    assert libraries.slurm_check("", None).state == "note"


def test_threads_are_the_share_of_the_cores_unless_the_user_says() -> None:
    assert "1: 8, 2: 4, 4: 2" in machine.thread_check(8, 16, None).text
    assert machine.thread_check(2, 2, "2").state == "ok"
    assert machine.thread_check(2, 2, "8").state == "note"
    bad = machine.thread_check(2, 2, "many")
    assert (bad.state, bad.cure) == ("fault", "unset OMP_NUM_THREADS")


def test_gpus_are_a_note_until_pytorch_and_horovod_use_them() -> None:
    card, cuda = ["NVIDIA H100"], {"cuda_version": "13.0", "cuda_devices": ["NVIDIA H100"]}
    assert "CPU" in machine.gpu_check("", [], {}, nccl=False).text
    assert "TORCH_INDEX" in machine.gpu_check("580", card, {}, nccl=False).cure
    assert "--cuda" in machine.gpu_check("580", card, cuda, nccl=False).cure
    assert machine.gpu_check("580", card, cuda, nccl=True).state == "ok"


@pytest.mark.parametrize(
    ("matrices", "convolutions", "expected"),
    [
        (
            4.0,
            1.0,
            "fp32 takes 2.0x the processor time of bf16 on 2 threads (bf16: matrices 4.00x, ",
        ),
        (1.5, 1.5, "--precision bf16"),
        (1.05, 1.08, "bf16 and fp32 are about equally fast on 2 threads"),
        (0.95, 0.91, "keep the default, --precision fp32"),
        (2.0, 0.5, "about equally fast"),
        (0.5, 0.5, "bf16 takes 2.0x the processor time of fp32 on 2 threads"),
        (0.1, 0.4, "train --precision fp32"),
    ],
)
def test_the_faster_precision_is_named_with_its_option(
    matrices: float, convolutions: float, expected: str
) -> None:
    speedups = {"matrices": matrices, "convolutions": convolutions}
    facts = {"is_gpu": False, "threads": 2, "speedups": speedups}
    check = machine.precision_check(facts, "")
    assert (check.name, check.state, check.cure) == ("precision", "ok", "")
    assert expected in check.text
    on_gpu = machine.precision_check(facts | {"is_gpu": True}, "")
    assert " on the GPU (bf16: " in on_gpu.text
    on_one = machine.precision_check(facts | {"threads": 1}, "")
    assert " on 1 thread (bf16: " in on_one.text


def test_precisions_that_could_not_be_compared_are_a_note_with_the_reason() -> None:
    check = machine.precision_check(None, "it was killed by SIGILL")
    assert (check.state, is_fit([check])) == ("note", True)
    assert "not compared: it was killed by SIGILL" in check.text


def test_little_shared_memory_or_disk_is_a_note() -> None:
    much = 2**40
    assert machine.space_check(much, much, much).state == "ok"
    assert "--shm-size" in machine.space_check(2**26, 2**26, much).cure
    assert "--run" in machine.space_check(much, much, 2**20).cure


def test_one_fault_makes_a_machine_unfit_and_notes_do_not() -> None:
    fine = [Check("a", "ok", "text"), Check("b", "note", "text")]
    broken = [*fine, Check("Horovod", "fault", "gone", "make setup")]
    assert is_fit(fine)
    assert not is_fit(broken)
    assert "on one rank works" in verdict(broken, {})
    assert "does not work" in verdict([Check("PyTorch", "fault", "gone", "x")], {})
    lines = {"mpirun": {2: "mpirun -np 2 hvdtrain train"}}
    text = report_as_text(broken, lines)
    assert "fix: make setup" in text
    assert "  mpirun -np 2 hvdtrain train --model cnn --data DIR" in text.splitlines()
    report = json.loads(report_as_json(broken, lines))
    assert report["fit"] is False
    assert report["launch_lines"] == {"mpirun": {"2": "mpirun -np 2 hvdtrain train"}}
    assert report["checks"][2] == {
        "name": "Horovod",
        "state": "fault",
        "text": "gone",
        "cure": "make setup",
    }


def test_facts_are_found_among_what_others_print() -> None:
    output = 'noise\n[1,0]<stdout>:hvdtrain-doctor-fact {"a": 1}\nhvdtrain-doctor-fact {"b": 2}\n'
    assert read_facts(output) == {"a": 1, "b": 2}


def test_the_reason_is_the_exception_or_the_launchers_remark_or_the_last_line() -> None:
    frame = "-" * 74
    assert failure("Traceback:\n x\nValueError: no\nlater talk\n") == "ValueError: no"
    assert failure(f"{frame}\nThere are not\nenough slots\n{frame}\n") == (
        "There are not enough slots"
    )
    assert failure("one\ntwo\n") == "two"
    assert failure("") == ""


def test_a_process_that_hangs_is_ended_with_its_children() -> None:
    start = time.monotonic()
    # The child holds the pipe open: waiting until it ends would take a minute.
    outcome = run(["/bin/sh", "-c", "sleep 60 & sleep 60"], 0.2)
    assert outcome.reason == "it hung and was killed after 0 s"
    assert time.monotonic() - start < 20


def test_a_program_that_crashes_or_is_missing_gives_a_reason_and_no_traceback() -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert run([sys.executable, "-c", crash], 20).reason == "it was killed by SIGSEGV"
    assert "No such file" in run(["/no/such/program"], 20).reason
