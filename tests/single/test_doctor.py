"""Doctor on this machine, and with parts of its environment really broken."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.doctor import libraries
from hvdtrain.host.launchers import own_mpirun

REPOSITORY = Path(__file__).parents[2]
BESIDE_PYTHON = Path(sys.executable).parent


def environment(*first_in_path: Path, **extra: str) -> dict[str, str]:
    folders = [*map(str, first_in_path), os.environ.get("PATH", os.defpath)]
    return {**os.environ, "PATH": os.pathsep.join(folders), **extra}


def examine(
    python: str, env: dict[str, str], *options: str
) -> tuple[int, subprocess.CompletedProcess[str]]:
    command = [python, "-m", "hvdtrain", "doctor", *options]
    result = subprocess.run(
        command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
    )
    assert "Traceback" not in result.stderr
    return result.returncode, result


def checks_by_name(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in report["checks"]}


@pytest.fixture(scope="module")
def sound() -> tuple[int, dict[str, Any]]:
    code, result = examine(sys.executable, environment(BESIDE_PYTHON), "--json")
    return code, json.loads(result.stdout)


@pytest.mark.proves(
    "`doctor` names each fault with its cure, and the launch lines that it prints train."
)
def test_this_machine_is_fit(sound: tuple[int, dict[str, Any]]) -> None:
    """One test, since two workers of pytest would each examine the machine for their own."""
    code, report = sound
    faults = [check for check in report["checks"] if check["state"] == "fault"]
    assert faults == []
    assert (code, report["fit"]) == (0, True)
    checks = checks_by_name(report)
    for name in ("one MPI", "all-reduce by mpi4py", "all-reduce by Horovod", "process sets"):
        assert checks[name]["state"] == "ok", checks[name]
    assert "mpi4py, Horovod and" in checks["one MPI"]["text"]
    assert "MPI_THREAD_MULTIPLE" in checks["mpi4py"]["text"]

    check = checks["all-reduce algorithm"]
    assert check["state"] == "ok", check
    assert "--allreduce ring gives ring at every size" in check["text"]
    assert "chosen by" in check["text"]

    check = checks["precision"]
    assert check["state"] == "ok", check
    ratios = [*map(float, re.findall(r"(?:matrices|convolutions) ([0-9.]+)x", check["text"]))]
    assert len(ratios) == 2
    advice = re.search(r": (train|keep the default,) --precision (bf16|fp32)$", check["text"])
    assert advice, check
    if min(ratios) > 1.5 or max(ratios) < 0.6:  # otherwise any advice may follow, by the processor
        faster = "bf16" if min(ratios) > 1.5 else "fp32"
        assert advice.groups() == ("train", faster), check


@pytest.mark.weekly
def test_the_printed_lines_train(sound: tuple[int, dict[str, Any]], tmp_path: Path) -> None:
    lines = sound[1]["launch_lines"]
    assert {"horovodrun", "mpirun", "hvdtrain"} <= lines.keys()
    synth = ["data", "synth", str(tmp_path / "data"), "--images", "64", "--classes", "4"]
    subprocess.run([sys.executable, "-m", "hvdtrain", *synth], cwd=REPOSITORY, check=True)
    for launcher, by_ranks in lines.items():
        ranks = max(by_ranks, key=int) if launcher == "horovodrun" else "2"
        run = tmp_path / launcher
        options = f"--model cnn --data {tmp_path}/data --epochs 1 --batch-size 16 --run {run}"
        result = subprocess.run(
            ["/bin/sh", "-c", f"{by_ranks[ranks]} {options}"],
            env=environment(BESIDE_PYTHON),
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert json.loads((run / "summary.json").read_text())["ranks"] == int(ranks)


@pytest.mark.weekly
def test_a_broken_horovod_and_a_foreign_mpirun_are_faults_with_cures(tmp_path: Path) -> None:
    foreign = tmp_path / "bin" / "mpirun"
    foreign.parent.mkdir()
    foreign.write_text('#!/bin/sh\necho "mpirun (Open MPI) 4.1.4"\n')
    foreign.chmod(0o755)
    broken = tmp_path / "packages" / "horovod" / "__init__.py"
    broken.parent.mkdir(parents=True)
    broken.write_text('raise ImportError("libmpi.so.40: cannot open shared object file")\n')
    env = environment(foreign.parent, PYTHONPATH=f"{broken.parents[1]}{os.pathsep}{REPOSITORY}")
    code, result = examine(sys.executable, env, "--json")
    report = json.loads(result.stdout)
    checks = checks_by_name(report)
    assert (code, report["fit"], report["launch_lines"]) == (1, False, {})
    assert checks["Horovod"]["state"] == "fault"
    assert "cannot open shared object file" in checks["Horovod"]["text"]
    assert "hvdtrain setup" in checks["Horovod"]["cure"]
    assert checks["one MPI"]["state"] == "fault"
    assert "Open MPI 4.1.4" in checks["one MPI"]["text"]
    if own_mpirun():
        assert checks["one MPI"]["cure"] == f'export PATH="{BESIDE_PYTHON}:$PATH"'
        assert checks["all-reduce by mpi4py"]["state"] == "ok"


def test_without_horovod_several_ranks_train_by_mpi() -> None:
    missing = {"error": "ModuleNotFoundError: No module named 'horovod'"}
    check = libraries.horovod_check(missing)
    assert check.state == "note"
    assert "--reduce-with mpi" in check.text
    broken = libraries.horovod_check({"error": "ImportError: libmpi.so.40: missing"})
    assert broken.state == "fault"
    assert "--reduce-with mpi" in broken.cure


def test_without_mpi_the_cure_is_said_and_that_one_rank_works(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    installed = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in installed]
    (packages / "installed.pth").write_text("".join(lines))
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    without = [name for name in folders if not (Path(name) / "mpirun").exists()]
    env = {**os.environ, "PATH": os.pathsep.join(without), "PYTHONPATH": str(REPOSITORY)}
    env["SLURM_CONF"] = str(tmp_path / "no-cluster")
    code, result = examine(str(tmp_path / "env" / "bin" / "python"), env)
    assert code == 1
    assert "fault  one MPI" in result.stdout
    assert "there is no mpirun" in result.stdout
    assert "fix: run hvdtrain setup" in result.stdout
    assert "ok     PyTorch" in result.stdout
    assert "Training on one rank works" in result.stdout
