"""Compare small runs of every kind with recorded ones, so that moving code changes no number.

    python tools/reference_runs.py                 compare with tools/reference_runs.json
    python tools/reference_runs.py --record        write that file
    python tools/reference_runs.py --only dp,mp    only these runs

A run is compared by the samples that entered its gradients, the losses and accuracies of its
metrics, and the hash of its weights. Processors round differently: on another one than the
recording's, losses may differ by CLOSE, and the hashes are not compared.

Exit code: 1 if a run differs or fails.
"""

import argparse
import csv
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = ROOT / "tools" / "reference_runs.json"
CLOSE = 1e-3
PROGRAM = (sys.executable, "-m", "hvdtrain")
TRAIN = (
    *("--model", "cnn", "--batch-size", "26", "--epochs", "2", "--seed", "3", "--threads", "1"),
    *("--optimizer", "sgd", "--lr", "0.01", "--augment", "crop-flip"),
)
LOOP = """
import hashlib, json, sys
import torch
from torch.nn import functional
import hvdtrain.torch as distributed

rank = distributed.start()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
    torch.nn.Linear(8 * 30 * 30, 4),
)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
model, optimizer = distributed.prepare(model, optimizer)
losses = []
for epoch in range(2):
    for images, labels in distributed.loader(sys.argv[1], batch_size=26):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    measured = distributed.evaluate(model, distributed.loader(sys.argv[1], 26, split="test"))
    losses.append(measured)
if rank.is_first:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    print(json.dumps({"losses": losses, "weights": digest.hexdigest()}))
"""


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        words: options of `train`.
        then: more options of a second command, which resumes the run.
        is_measured: times that it measured may change its plan, and so the rounding of its sums.
    """

    ranks: int
    words: str = ""
    then: str | None = None
    is_measured: bool = False


BY_MPI = " --reduce-with mpi"
CASES = {
    "serial": Case(1),
    "bf16": Case(1, "--precision bf16"),
    "accumulation": Case(1, "--accumulate 3 --clip-norm 1 --loss cross-entropy:0.1"),
    "dp": Case(2, "--optimizer adamw --lr 0.001 --weight-decay 0.1" + BY_MPI),
    "horovod": Case(2),
    "dp-3": Case(3, "--batch-norm sync --model resnet18 --max-steps 3" + BY_MPI),
    "mp": Case(2, "--plan mp --schedule 1f1b" + BY_MPI),
    "mp-vit": Case(2, "--plan mp --model vit_tiny --max-steps 4 --schedule interleaved" + BY_MPI),
    "zb-h1": Case(3, "--plan mp --schedule zb-h1" + BY_MPI),
    "hp": Case(4, "--plan hp:2x2 --recompute all" + BY_MPI),
    "adaptive": Case(2, "--plan adaptive --inject 'replan step=5'" + BY_MPI, is_measured=True),
    "local": Case(2, "--sync local:3" + BY_MPI),
    "diloco": Case(2, "--sync diloco:3" + BY_MPI),
    "server": Case(3, "--sync server"),
    "top-k": Case(2, "--compress topk:0.1,after=2" + BY_MPI),
    "powersgd": Case(2, "--compress powersgd:2,after=2" + BY_MPI),
    "sharded": Case(2, "--shard-optimizer --optimizer adam --lr 0.001" + BY_MPI),
    "holdout": Case(2, "--holdout 0.2 --lr-schedule cosine --warmup-epochs 0.5" + BY_MPI),
    "resumed": Case(2, "--max-steps 5" + BY_MPI, "--resume --max-steps 8"),
    "other plan": Case(2, "--max-steps 7" + BY_MPI, "--resume --plan mp --max-steps 8"),
    "keras": Case(2, "--framework tensorflow"),
    "own loop": Case(2),
}


def main() -> None:
    """Run the cases and compare or record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", default=",".join(CASES))
    options = parser.parse_args()
    recorded = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {"runs": {}}
    processor = _processor()
    is_same = recorded.get("processor") == processor
    actual, faults = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synth = ("data", "synth", data, "--images", "100", "--classes", "4", "--seed", "1")
        subprocess.run([*PROGRAM, *map(str, synth)], check=True, stdout=subprocess.DEVNULL)
        for name in options.only.split(","):
            case = CASES[name]
            try:
                actual[name] = (
                    _loop(data) if name == "own loop" else _run(case, data, Path(folder))
                )
            except subprocess.CalledProcessError as error:
                print(f"{name}: failed\n{error.stdout}{error.stderr}")
                faults += 1
                continue
            exact = is_same and not case.is_measured
            expected = recorded["runs"].get(name, {})
            if case.is_measured:  # another plan may give the samples to other ranks
                expected = expected | {"ledger": actual[name]["ledger"]}
            differences = _differences(actual[name], expected, exact)
            faults += bool(differences)
            print(f"{name}: {'; '.join(differences) or 'as recorded'}", flush=True)
    if options.record:
        runs = recorded["runs"] | actual
        kept = {name: runs[name] for name in CASES if name in runs}
        EXPECTED.write_text(json.dumps({"processor": processor, "runs": kept}, indent=1) + "\n")
    elif not is_same:
        print("recorded on another processor: weights are not compared")
    sys.exit(1 if faults and not options.record else 0)


def _run(case: Case, data: Path, folder: Path) -> dict[str, Any]:
    run = Path(tempfile.mkdtemp(dir=folder)) / "run"
    common = ["--data", data, "--run", run, "--ledger", run.parent / "ledger.csv"]
    words = [*TRAIN, *map(str, common), "--ranks", str(case.ranks), *shlex.split(case.words)]
    _output([*PROGRAM, "train", *words])
    if case.then is not None:
        _output([*PROGRAM, "train", *words, *case.then.split()])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["event"] == "epoch"]
    measured = ("train_loss", "test_loss", "test_accuracy", "val_loss", "val_accuracy")
    with (run.parent / "ledger.csv").open() as file:
        rows = sorted(csv.reader(file))
    return {
        "ledger": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        "losses": [{key: line[key] for key in measured if key in line} for line in epochs],
        "weights": json.loads((run / "summary.json").read_text())["weights_sha256"],
    }


def _loop(data: Path) -> dict[str, Any]:
    script = data.parent / "loop.py"
    script.write_text(LOOP)
    mpirun = (Path(sys.executable).with_name("mpirun"), "-np", "2", "--bind-to", "none")
    result: dict[str, Any] = json.loads(_output([*mpirun, sys.executable, script, data]))
    return result


def _output(command: list[Any]) -> str:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    settings = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PYTHONPATH": str(ROOT)}
    environment = os.environ | root | settings
    words = list(map(str, command))
    return subprocess.run(
        words, env=environment, check=True, capture_output=True, text=True
    ).stdout


def _differences(actual: Mapping[str, Any], recorded: Mapping[str, Any], exact: bool) -> list[str]:
    differences = []
    if actual.get("ledger") != recorded.get("ledger"):
        differences.append("other samples")
    if exact and actual["weights"] != recorded.get("weights"):
        differences.append("other weights")
    bound = 0.0 if exact else CLOSE
    pairs = list(zip(actual["losses"], recorded.get("losses", []), strict=False))
    if len(pairs) != len(actual["losses"]) or any(
        mine.keys() != recording.keys()
        or any(abs((mine[key] or 0) - (recording[key] or 0)) > bound for key in mine)
        for mine, recording in pairs
    ):
        differences.append(f"losses {actual['losses']}, recorded {recorded.get('losses')}")
    return differences


def _processor() -> str:
    """Return what decides how products round."""
    name = next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
