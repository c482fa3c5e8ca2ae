"""Compares the planner's mixed plan with dp and the best pipeline on a slow link (root only).

    python benchmarks/mixed_plan.py [--model cnn] [--images 32] [--gigabits 0.2] [--rounds 5]

Two ranks on a link that `tc` limits (benchmarks/link.py). The planner measures components and
network on it, as `--plan auto` does, and predicts the step of data parallelism, of the best plan
whose stages are on ranks of their own, and of the best one in which a rank is in several stages.
Each round trains with all three, in turns; the first steps of a job do not count. The ratio is
that of the medians of a round: its median over the rounds, and its range.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
from link import Link

WARM_UP = 4  # steps of each job that do not count
DP, PIPELINE, MIXED = "dp", "pipeline", "mixed"


def main() -> None:
    """Predict and measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--images", type=int, default=32, help="images per step")
    parser.add_argument("--gigabits", type=float, default=0.2, help="bandwidth in Gbit/s")
    parser.add_argument("--steps", type=int, default=60, help="steps per job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--predict", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.predict:
        _predict(options)
        return
    with tempfile.TemporaryDirectory() as folder, Link(options.gigabits) as link:
        from hvdtrain.data import synth

        data = Path(folder) / "data"
        synth(data, options.images * (options.steps + 1), common.CLASSES, size=common.SIZE)
        command = [sys.executable, __file__, "--predict", "--model", options.model]
        command += ["--images", str(options.images)]
        plans = json.loads(common.run_all([link.mpirun(command)], threads=1)[0])
        for name, plan in plans.items():
            Path(folder, f"{name}.json").write_text(json.dumps(plan["plan"]))

        def seconds(name: str, number: int) -> float:
            run = Path(folder) / f"{name}-{number}"
            arguments = f"--model {options.model} --threads 1 --batch-size {options.images}"
            arguments += f" --plan {folder}/{name}.json --max-steps {options.steps}"
            arguments += " --log-every 1 --eval-every 0"
            common.run_all([link.mpirun(common.training(arguments, data, run))], threads=1)
            return statistics.median(common.step_seconds(run, options.images)[WARM_UP:])

        sides = [lambda number, name=name: seconds(name, number) for name in plans]
        values = dict(zip(plans, common.rounds(options.rounds, sides), strict=True))
    print(
        f"{options.model}, 2 ranks x 1 thread, {options.images} images per step, "
        f"{options.gigabits:g} Gbit/s"
    )
    for name, plan in plans.items():
        ratios = [one / mixed for one, mixed in zip(values[name], values[MIXED], strict=True)]
        stages = " | ".join(
            f"{' '.join(stage['components'])} on {stage['ranks']}"
            for stage in plan["plan"]["stages"]
        )
        print(
            f"{name:>9} {1e3 * statistics.median(values[name]):8.2f} ms, predicted "
            f"{1e3 * plan['seconds']:8.2f}; as long as mixed x "
            f"{common.spread(ratios, '.2f')}; {plan['plan']['microbatches']} x {stages}"
        )


def _predict(options: argparse.Namespace) -> None:
    """Run one rank of the predictions; rank 0 prints them."""
    from hvdtrain import world
    from hvdtrain.plan.plan import Plan
    from hvdtrain.planner import choose
    from hvdtrain.planner.solve import solve

    job = world.start(threads=1)
    config, _, known = common.measured(options.model, options.images, job)

    def kind(plan: Plan) -> str:
        if len(plan.stages) == 1:
            return DP
        held = sum(len(stage.ranks) for stage in plan.stages)
        return PIPELINE if held == len(plan.ranks) else MIXED

    if job.rank == 0:
        best: dict[str, Any] = {}
        for candidate in solve(choose.question(config, known, job.size)).candidates:
            entry = {"plan": candidate.plan.to_json(), "seconds": candidate.seconds}
            best.setdefault(kind(candidate.plan), entry)
        print(json.dumps(best), flush=True)
    world.stop()


if __name__ == "__main__":
    main()
