"""Measures what each ingredient of a recipe is worth, by leaving it out.

    python benchmarks/ingredients.py --recipe recipes/cifar10-94.yaml --data data/cifar10
                                     --to runs/ingredients [--ranks 2] [--seeds 2] [--epochs 7]

Each variant is the recipe with other values of a few options, trained with the same seeds. What a
file beside the recipe does (whitening, lookahead, views) is left out by a copy of the file. All
runs are in random order. Finished runs are kept, so that the same command adds seeds or
continues after a stop. A recipe's epochs can be cut down: its warm-up is cut in proportion.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.config import TrainConfig
from hvdtrain.host.records import as_csv, read_mapping
from hvdtrain.options.givenmodel import beside
from hvdtrain.options.names import folded
from hvdtrain.study.laws import difference, markdown_table, number
from hvdtrain.study.runs import Arm, run_all

WHOLE = "the recipe"
# What each variant has in place of the recipe's values.
VARIANTS: dict[str, dict[str, Any]] = {
    WHOLE: {},
    "neither shifts nor flips, one view": {"augment": "none"},
    "shifts of 4, random flips, one view": {"augment": "crop-flip"},
    "constant rate": {"lr_schedule": "constant"},
    "SGD": {"optimizer": "sgd", "weight_decay": 0.0005},
    "no label smoothing": {"loss": "cross-entropy"},
    "fp32": {"precision": "fp32"},
}


def main() -> None:
    """Train the variants and print their accuracies."""
    options = _options()
    file = Path(options.recipe)
    values = beside(folded(read_mapping(file, "recipe")), file.parent)
    recipe = TrainConfig(**values | {"data": options.data})
    if options.epochs is not None:
        share = options.epochs / (recipe.epochs or options.epochs)
        warmup = recipe.warmup_epochs * share
        recipe = replace(recipe, epochs=options.epochs, warmup_epochs=warmup)
    recipe = replace(recipe, eval_every=recipe.epochs or 1, expected=None)
    names = options.variants.split(",") if options.variants else list(VARIANTS)
    if unknown := [name for name in names if name not in VARIANTS]:
        sys.exit(f"unknown variant {unknown[0]!r}: use some of {', '.join(VARIANTS)}")
    arms = [
        Arm(name.replace(" ", "-"), name, options.ranks, config.check())
        for name in dict.fromkeys([WHOLE, *names])
        if (config := replace(recipe, **VARIANTS[name])) != recipe or name == WHOLE
    ]
    folders = run_all(arms, options.seeds, Path(options.to), lambda line: print(line, flush=True))
    accuracies = {arm.name: [_accuracy(run) for run in folders[arm.key]] for arm in arms}
    print(markdown_table([_row(name, accuracies) for name in accuracies]))
    (Path(options.to) / "ingredients.csv").write_text(
        as_csv(
            ("variant", "seed", "test accuracy"),
            [
                (name, n, value)
                for name, all_ in accuracies.items()
                for n, value in enumerate(all_)
            ],
        )
    )


def _row(name: str, accuracies: dict[str, list[float]]) -> dict[str, str]:
    values, whole = accuracies[name], accuracies[WHOLE]
    points = difference([100 * value for value in values], [100 * value for value in whole])
    return {
        "variant": name,
        "runs": str(len(values)),
        "mean test accuracy": f"{sum(values) / len(values):.2%}",
        "points more than the recipe": "-" if name == WHOLE else number(points, "+.2f"),
    }


def _accuracy(run: Path) -> float:
    final = json.loads((run / "summary.json").read_text())["final"]
    return float(final["test_accuracy"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--to", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--variants", help="some of the variants, with commas")
    return parser.parse_args()


if __name__ == "__main__":
    main()
