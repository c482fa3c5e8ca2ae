"""Compares emulated steps with measured ones, and with predictions for 2 to 64 GPUs.

    python benchmarks/emulation.py here [--models resnet18,vit_tiny] [--rounds 3]
    python benchmarks/emulation.py gpus [--models resnet50,vit_b16] [--ranks 2,4,8,16,32,64]

`here` profiles a model on two ranks of one thread, bound to cores, and trains it under the plans
of paper B: measured on these ranks, and emulated from the profile. `gpus` emulates V100 under the
same plans, as many on one node as there are, and compares with the simulator, whose plans these
are. Emulated ranks share the cores of this machine: a rank needs about 290 MiB.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import common
import yaml

from hvdtrain import models
from hvdtrain.data import synth
from hvdtrain.models.costs import component_costs
from hvdtrain.plan.plan import Plan, replicated
from hvdtrain.planner.candidate import play
from hvdtrain.planner.clusters import load
from hvdtrain.planner.strategies import pipelines
from hvdtrain.study.paper_b.plans import PUBLISHED, hybrid
from hvdtrain.study.paper_b.v100 import CLUSTER, IMAGE_SIZE, costs_of, question_for

WARM_UP = 2  # steps that do not count
PIXELS = 8  # of the images, which emulated ranks read but do not look at


def main() -> None:
    """Print a row per model, plan and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["here", "gpus"])
    parser.add_argument("--models", default="", help="default: as above")
    parser.add_argument("--ranks", default="2,4,8,16,32,64", help="of gpus")
    parser.add_argument("--images", type=int, default=32, help="per step, of here")
    parser.add_argument("--steps", type=int, default=6, help="per run")
    parser.add_argument("--rounds", type=int, default=3, help="of measured runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.part == "here":
            for model in (options.models or "resnet18,vit_tiny").split(","):
                _here(options, model, Path(folder) / model)
            return
        for model in (options.models or "resnet50,vit_b16").split(","):
            for ranks in map(int, options.ranks.split(",")):
                _gpus(model, ranks, options.steps, Path(folder) / f"{model}-{ranks}")


def _here(options: argparse.Namespace, model: str, folder: Path) -> None:
    data, ranks = folder / "data", 2
    synth(data, options.images * (options.steps + 1), common.CLASSES, size=common.SIZE)
    every = f"--model {model} --batch-size {options.images} --threads 1 --ranks {ranks}"
    every += f" --max-steps {options.steps} --log-every 1 --eval-every 0"
    profile = folder / "profile.json"
    command = f"{every} --bind --plan auto --profile {profile}"
    common.run_all([common.training(command, data, folder / "profiled")], threads=1)
    components = models.components(model, common.CLASSES, common.SIZE)
    costs = list(component_costs(components, common.SIZE, classes=common.CLASSES))
    (folder / "hybrid.json").write_text(json.dumps(hybrid(costs, ranks).to_json()))
    for name, plan in {"DP": "dp", "MP": "mp", "hybrid": f"{folder}/hybrid.json"}.items():
        measured = []
        for number in range(options.rounds):
            run = folder / f"{name}-{number}"
            arguments = f"{every} --bind --plan {plan}"
            common.run_all([common.training(arguments, data, run)], threads=1)
            seconds = common.step_seconds(run, options.images)[WARM_UP:]
            measured.append(statistics.median(seconds))
        run = folder / f"{name}-emulated"
        arguments = f"{every} --plan {plan} --emulate {profile}"
        common.run_all([common.training(arguments, data, run)], threads=1)
        emulated = _emulated(run)
        middle = statistics.median(measured)
        print(
            f"{model:>9} {name:>6}: measured {1e3 * middle:7.1f} ms "
            f"({1e3 * min(measured):.1f} to {1e3 * max(measured):.1f}), emulated "
            f"{1e3 * emulated['step_seconds']:7.1f}: "
            f"{emulated['step_seconds'] / middle - 1:+.1%}, dilation {emulated['dilation']:g}",
            flush=True,
        )


def _gpus(model: str, ranks: int, steps: int, folder: Path) -> None:
    data, cluster = folder / "data", replace(load(CLUSTER), ranks=ranks, ranks_per_node=ranks)
    row = PUBLISHED[model]
    synth(data, row.batch_size * (steps + 1), common.CLASSES, size=PIXELS)
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({key: one for key, one in asdict(cluster).items() if one}))
    question = question_for(model, cluster, costs_of(model))
    named: dict[str, Plan] = {"DP": replicated(question.known.profile.names, ranks, None, None)}
    staged = pipelines(question)
    if staged:
        named["MP" if len(staged[0].stages) == ranks else "deepest"] = staged[0]
    if staged[1:]:
        named["hybrid"] = min(staged[1:], key=lambda plan: play(question, plan, "").seconds)
    for name, plan in named.items():
        (folder / f"{name}.json").write_text(json.dumps(plan.to_json()))
        run = folder / name
        arguments = f"--model {model} --batch-size {row.batch_size} --image-size {IMAGE_SIZE}"
        arguments += f" --threads 1 --ranks {ranks} --emulate {path} --device cpu --eval-every 0"
        arguments += f" --log-every 1 --max-steps {steps}"
        command = [*common.training(arguments, data, run), "--plan", str(folder / f"{name}.json")]
        common.run_all([command], threads=1)
        emulated, predicted = _emulated(run), play(question, plan, "").seconds
        print(
            f"{model:>9} {name:>16} on {ranks:2}: predicted {1e3 * predicted:6.1f} ms, emulated "
            f"{1e3 * emulated['step_seconds']:6.1f}: "
            f"{emulated['step_seconds'] / predicted - 1:+.1%}, dilation {emulated['dilation']:g}; "
            f"{len(plan.stages)} stage(s)",
            flush=True,
        )


def _emulated(run: Path) -> Mapping[str, float]:
    emulated: Mapping[str, float] = json.loads((run / "summary.json").read_text())["emulated"]
    return emulated


if __name__ == "__main__":
    main()
