"""What less noise at the same ε is worth: pairs of runs, with the noise of RDP and that of "auto".

    python examples/same_epsilon.py

Tasks, settings and δ are those of `choosing.py`, whose search chose the settings with the
noise of RDP. The two runs of a pair have the same initial weights; batches and noise are drawn anew
in each. Judged on test data. Writes every run to `output/same_epsilon/results.csv`, where it goes
on if it was interrupted, and the mean difference of the pairs to `same_epsilon.md`.
"""

import argparse
import functools
import itertools
import json
import pathlib

import choosing
import numpy as np
import results

from dp_keras_opt.tuning import candidates, runs

SETTINGS = pathlib.Path(__file__).resolve().parents[1] / "docs" / "how_to" / "choosing"
CANDIDATES = ("DPSGD, momentum", "DPAdam, bias-corrected")
ACCOUNTANTS = ("rdp", "auto")
KEY = ("task", "candidate", "epsilon", "accountant", "seed")


def setting(task, candidate):
    """The values of its hyper-parameters that the search of `choosing.py` found best."""
    found = {
        row["values"]
        for row in results.rows(SETTINGS / f"results-{task}.csv")
        if (row["part"], row["candidate"]) == ("test", candidate)
    }
    (values,) = found
    return json.loads(values)


def run(tasks, name, candidate, epsilon, accountant, seed):
    """One training."""
    task = tasks[name]
    values = setting(name, candidate)
    model = runs.train(
        task, candidates.get(candidate), values, epsilon, choosing.DELTA, seed,
        accountant=accountant,
    )  # fmt: skip
    return {
        "values": json.dumps(values),
        "noise_multiplier": model.optimizer.noise_multiplier,
        "score": runs.score(task, model, task.test),
    }


def table(rows):
    """σ and score by both accountants, and the mean difference of the pairs with its error."""
    lines = [
        "| task | optimizer | ε | σ, RDP | σ, auto | score, RDP | score, auto | difference |",
        "|---" * 8 + "|",
    ]
    pairs = {}
    for row in rows:
        setting = row["task"], row["candidate"], row["epsilon"]
        pair = pairs.setdefault(setting, {}).setdefault(row["seed"], {})
        pair[row["accountant"]] = row
    for (task, candidate, epsilon), of_seed in pairs.items():
        whole = [pair for pair in of_seed.values() if len(pair) == len(ACCOUNTANTS)]
        if len(whole) < 2:
            continue
        sigmas = [float(whole[0][name]["noise_multiplier"]) for name in ACCOUNTANTS]
        scores = np.float64([[pair[name]["score"] for name in ACCOUNTANTS] for pair in whole])
        difference = scores[:, 1] - scores[:, 0]
        error = difference.std(ddof=1) / len(difference) ** 0.5
        lines.append(
            f"| {task} | {candidate} | {epsilon} | {sigmas[0]:.4f} | {sigmas[1]:.4f} | "
            f"{scores[:, 0].mean():.4f} | {scores[:, 1].mean():.4f} | "
            f"{difference.mean():+.4f} ± {error:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=choosing.TASKS, default=[*choosing.TASKS])
    parser.add_argument("--epsilons", nargs="+", type=float, default=choosing.EPSILONS)
    parser.add_argument("--candidates", nargs="+", default=CANDIDATES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("output/same_epsilon"))
    options = parser.parse_args()
    tasks = {name: choosing.TASKS[name]() for name in options.tasks}
    settings = (
        (*rest, seed)
        for seed, *rest in itertools.product(
            range(options.seeds), options.tasks, options.candidates, options.epsilons, ACCOUNTANTS
        )
    )
    text = table(
        results.completed(
            options.output / "results.csv", KEY, settings, functools.partial(run, tasks)
        )
    )
    (options.output / "same_epsilon.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
