"""What averaging the weights is worth: the average over the last part of a run, and its end.

    python examples/weight_averages.py

Tasks and δ are those of `choosing.py`, and the settings those that its search found best, with
independent and with correlated noise. Both answers come from one run: the weights after its last
step, and the uniform average of those from `--start` (a share of the steps) on. Judged on test
data. Writes every run to `output/weight_averages/results.csv`, where it goes on if it was
interrupted, and the mean differences to `weight_averages.md`.
"""

import argparse
import functools
import itertools
import pathlib

import choosing
import keras
import numpy as np
import results
from same_epsilon import setting

import dp_keras_opt as dp
from dp_keras_opt.tuning import candidates, runs

RULES = (
    "DPSGD, momentum",
    "DPSGD, momentum, banded noise",
    "DPAdam, bias-corrected",
    "DPAdam, bias-corrected, banded noise",
)
KEY = ("task", "rule", "epsilon", "start", "seed")


class Last(keras.callbacks.Callback):
    """Keeps the weights of the last step: at its end `fit` puts the average in their place."""

    def on_epoch_end(self, epoch, logs=None):
        self.weights = self.model.get_weights()


def run(tasks, name, rule, epsilon, start, seed):
    """One training, with the score of both."""
    task = tasks[name]
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
    return {
        "noise_multiplier": optimizer.noise_multiplier,
        "score": runs.score(task, model, task.test),
        "score_of_average": of_average,
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
    tasks = {name: choosing.TASKS[name]() for name in options.tasks}
    settings = (
        (*rest, seed)
        for seed, *rest in itertools.product(
            range(options.seeds), options.tasks, options.rules, options.epsilons, [options.start]
        )
    )
    text = table(
        results.completed(
            options.output / "results.csv", KEY, settings, functools.partial(run, tasks)
        )
    )
    (options.output / "weight_averages.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
