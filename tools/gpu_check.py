"""Check hvdtrain on a machine with a GPU, in stages, and keep what each stage printed as JSON.

    python tools/gpu_check.py --to gpu.json [--data data/cifar10] [--set-up] [--seconds 540]

Run it in an installed environment, or with --set-up where Horovod is still to be built. Stages
that passed are not repeated, so that the same command continues after a stop or a time limit; a
stage that failed does not stop the others. --device cpu rehearses all stages on the CPU, with
small sizes; --device late does so on a CPU whose copies are late, as those of a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 600  # seconds of a stage
KEPT = 6000  # last characters of a stage's output
PYTHON = sys.executable
TRAIN = (PYTHON, "-m", "hvdtrain", "train", "--stall-timeout", "120")


def stages(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the commands by name, in the order in which they are run."""
    device = "cuda" if options.device == "cuda" else "cpu"
    is_small = device == "cpu"
    images, steps = ("16", "6") if is_small else ("512", "120")
    overhead = [PYTHON, "benchmarks/overhead.py", "--device", device, "--precision", "bf16"]
    overhead += ["--images", images, "--steps", steps, "--window", "1" if is_small else "10"]
    step = [PYTHON, "-m", "hvdtrain", "bench", "step", "--device", device, "--precision", "bf16"]
    step += ["--batch-size", images, "--steps", steps, "--json", "--model"]
    by_name = {"machine": [PYTHON, "-m", "torch.utils.collect_env"]}
    if options.set_up:
        cuda = [] if is_small else ["--cuda"]
        by_name["set-up"] = [PYTHON, "-m", "hvdtrain.setup", "--mpi", "wheel", *cuda]
    by_name["doctor"] = [PYTHON, "-m", "hvdtrain", "doctor"]
    by_name["tests"] = [PYTHON, "-m", "pytest", "-v", "tests/gpu"]
    models = ("cnn",) if is_small else ("resnet18", "resnet50", "vit_b16")
    for model in models:
        by_name[f"{model} against a plain loop"] = [*overhead, "--model", model, "--rounds", "3"]
        by_name[f"step of {model}"] = [*step, model]
    if options.data is not None:
        by_name["CIFAR-10 to 94 %"] = _recipe(options, device, "cifar10-94")
        longer = ("--epochs", "40", "--warmup-epochs", "8", "--expected", "0.95")
        by_name["ResNet-18 to 95 %"] = _recipe(options, device, "cifar10-resnet18", *longer)
    return by_name


def _recipe(options: argparse.Namespace, device: str, name: str, *more: str) -> list[str]:
    """Return the command that trains a recipe; on a CPU for four steps."""
    where = ["--data", str(options.data), "--device", device]
    run = ["--run", str(options.to.with_suffix("") / name), "--resume", "auto"]
    short = ["--max-steps", "4"] if device == "cpu" else []
    return [*TRAIN, "--config", f"recipes/{name}.yaml", *where, *run, *more, *short]


def main() -> None:
    """Run the stages that have not passed yet."""
    options = _options()
    path, ends = options.to, time.monotonic() + options.seconds
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    todo = stages(options)
    for name, command in todo.items():
        before = results.get(name, {})
        if before.get("returncode") == 0 and before.get("command") == " ".join(command):
            print(f"{name}: passed before")
            continue
        left = ends - time.monotonic()
        if left < options.least:
            print(f"{name}: not run, {left:.0f} s are left: run the same command again")
            continue
        results[name] = run(command, min(LONGEST, left), settings(options.device))
        print(
            f"{name}: exit code {results[name]['returncode']} after {results[name]['seconds']} s"
        )
        if "NOT reached" in results[name]["output"] and options.device == "cuda":
            results[name]["returncode"] = 1
        path.write_text(json.dumps(results, indent=1) + "\n")
    failed = [name for name in todo if results.get(name, {}).get("returncode") != 0]
    if failed:
        sys.exit(f"not passed: {', '.join(failed)}")


def settings(device: str) -> dict[str, str]:
    """Return the environment variables of a stage."""
    if device != "late":
        return {"HVDTRAIN_TEST_DEVICE": device}
    # Python imports `sitecustomize` from there when it starts, in each process of a stage.
    return {"HVDTRAIN_TEST_DEVICE": "cpu", "PYTHONPATH": str(ROOT / "tests" / "late_start")}


def run(command: list[str], seconds: float, settings: Mapping[str, str]) -> dict[str, Any]:
    """Run a command in the root of the repository; return its exit code, output and seconds."""
    paths = [str(ROOT), settings.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    python_path = os.pathsep.join(filter(None, paths))
    # The commands of this environment first, as if it were activated.
    path = os.pathsep.join([str(Path(PYTHON).parent), os.environ.get("PATH", os.defpath)])
    started = time.monotonic()
    try:
        done = subprocess.run(
            ["timeout", "--kill-after=10", f"{seconds:.0f}", *command],
            cwd=ROOT,
            env={**os.environ, **settings, "PYTHONPATH": python_path, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        code, output = done.returncode, done.stdout
    except OSError as error:
        code, output = 127, str(error)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "returncode": code,
        "seconds": round(time.monotonic() - started, 1),
        "output": output[-KEPT:],
    }


def _path(text: str) -> Path:
    return Path(text).resolve()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--to", required=True, type=_path, help="JSON file of the results")
    parser.add_argument("--data", type=_path, help="packed CIFAR-10")
    parser.add_argument("--device", choices=("cuda", "cpu", "late"), default="cuda")
    parser.add_argument("--set-up", action="store_true", help="build Horovod first")
    parser.add_argument("--seconds", type=float, default=3600, help="time for all stages")
    parser.add_argument("--least", type=float, default=60, help="time that a stage needs to start")
    return parser.parse_args()


if __name__ == "__main__":
    main()
