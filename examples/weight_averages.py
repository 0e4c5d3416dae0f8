"""What averaging the weights is worth: the average over the last part of a run, and its end.

    python examples/weight_averages.py

Tasks and δ are those of `choosing.py`, and the settings those that its search found best, with
independent and with correlated noise. Both answers come from one run: the weights after its last
step, and the uniform average of those from `--start` (a share of the steps) on. Judged on test
data. Writes every run to `output/weight_averages/results.csv`, where it goes on if it was
interrupted, and the mean differences to `weight_averages.md`.
"""

import argparse
import csv
import itertools
import pathlib

import choosing
import keras
import numpy as np
from same_epsilon import known_runs, setting

import dp_keras_opt as dp
from dp_keras_opt.tuning import candidates, runs

RULES = (
    "DPSGD, momentum",
    "DPSGD, momentum, banded noise",
    "DPAdam, bias-corrected",
    "DPAdam, bias-corrected, banded noise",
)
KEY = ("task", "rule", "epsilon", "start", "seed")
COLUMNS = (*KEY, "noise_multiplier", "score", "score_of_average")


class Last(keras.callbacks.Callback):
    """Keeps the weights of the last step: at its end `fit` puts the average in their place."""

    def on_epoch_end(self, epoch, logs=None):
        self.weights = self.model.get_weights()


def run(task, name, rule, epsilon, start, seed):
    """One training, as a row with the score of both."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    candidate, values = candidates.get(rule), setting(name, rule)
    batches = task.batches(candidate)
    optimizer = runs.optimizer_for(
        task, candidate, values, batches.sampling, epsilon, choosing.DELTA
    )
    first = round(start * task.steps_of(candidate))
    optimizer = type(optimizer).from_config(optimizer.get_config() | {"average_from": first})
    model, last = dp.make_private(task.build()), Last()
    model.compile(optimizer, task.loss, metrics=[task.score] if task.score else [])
    model.fit(batches, verbose=0, callbacks=[last])
    of_average = runs.score(task, model, task.test)
    model.set_weights(last.weights)
    key = dict(zip(KEY, (name, rule, f"{epsilon:g}", f"{start:g}", f"{seed}"), strict=True))
    return key | {
        "noise_multiplier": f"{optimizer.noise_multiplier:.6g}",
        "score": f"{runs.score(task, model, task.test):.6g}",
        "score_of_average": f"{of_average:.6g}",
    }


def table(rows):
    """The mean score of both, and of their difference within the runs."""
    lines = [
        "| task | optimizer | ε | last weights | average | difference |",
        "|---" * 6 + "|",
    ]
    of_setting = {}
    for row in rows:
        key = row["task"], row["rule"], float(row["epsilon"]), row["start"]
        of_setting.setdefault(key, []).append((row["score"], row["score_of_average"]))
    for (task, rule, epsilon, _), found in sorted(of_setting.items()):
        last, average = np.float64(found).T
        if len(found) < 2:
            continue
        error = (average - last).std(ddof=1) / len(found) ** 0.5
        lines.append(
            f"| {task} | {rule} | {epsilon:g} | {last.mean():.4f} | {average.mean():.4f} | "
            f"{(average - last).mean():+.4f} ± {error:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=choosing.TASKS, default=[*choosing.TASKS])
    parser.add_argument("--epsilons", nargs="+", type=float, default=(1.0, 3.0))
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--start", type=float, default=0.75, help="share of the steps before it")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("output/weight_averages")
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "results.csv"
    rows = known_runs(path, KEY)
    tasks = {name: choosing.TASKS[name]() for name in options.tasks}
    for seed, (name, task), rule, epsilon in itertools.product(
        range(options.seeds), tasks.items(), options.rules, options.epsilons
    ):
        key = name, rule, f"{epsilon:g}", f"{options.start:g}", f"{seed}"
        if key in rows:
            continue
        rows[key] = run(task, name, rule, epsilon, options.start, seed)
        is_new = not path.exists()
        with open(path, "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if is_new:
                writer.writeheader()
            writer.writerow(rows[key])
    text = table(rows.values())
    (options.output / "weight_averages.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
