"""What planned noise is worth: pairs of runs at the same ε, with eight bands and as it is planned.

    python examples/planned_noise.py

Tasks and δ are those of `choosing.py`, and each task's rule is the one that its tables put first
among those with correlated noise. So are the rule's settings, which were searched for with eight
bands at ε = 3; with "planned, rate by σ" the learning rate is multiplied by the ratio of the two
σ. The runs of a pair have the same initial weights; batches and noise are drawn anew in each.
Judged on test data. Writes every run to `output/planned_noise/results.csv`, where it
goes on if it was interrupted, and the mean difference of the pairs to `planned_noise.md`.
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

RULES = {
    "ratings": "DPAdam, bias-corrected, banded noise",
    "clothes": "DPNesterov, banded noise",
    "text": "DPAdam, bias-corrected, banded noise",
    "tabular": "DPAdam, bias-corrected, banded noise",
}
EIGHT, PLANNED, RATE_BY_SIGMA = "8 bands", "planned", "planned, rate by σ"
HORIZON = "planned, horizon 20"
KEY = ("task", "rule", "epsilon", "noise", "seed")


def chosen(optimizer, task, noise, epsilon):
    """The `NoiseChoice` of a number of bands, or the best of the plan."""
    n, kinds = len(task.train[1]), None
    if noise.endswith(" bands"):
        bands = int(noise.split()[0])
        kinds = [dp.accounting.Sampling.cyclic_poisson(n, task.batch_size, bands, unit=task.unit)]
    horizon = int(noise.split()[-1]) if "horizon" in noise else None
    wanted = dp.accounting.Sampling.poisson(n, task.batch_size, unit=task.unit)
    return dp.accounting.plan_noise(
        optimizer, wanted, task.steps, epsilon, choosing.DELTA, samplings=kinds, horizon=horizon
    ).best


def batches(task, choice):
    """Sampled as it was planned, in one pass."""
    size, groups, steps = task.batch_size, choice.sampling.groups, choice.steps
    if groups == 1:
        return dp.data.poisson_batches(task.train, size, steps, unit=task.unit)
    return dp.data.cyclic_poisson(task.train, size, groups, steps, unit=task.unit)


def run(tasks, name, rule, epsilon, noise, seed):
    """One training."""
    task = tasks[name]
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    info = candidates.RunInfo(task.steps, task.batch_size, task.clip_norm)
    values = setting(name, rule)
    optimizer = candidates.get(rule).make(info, **values)
    choice = chosen(optimizer, task, noise, epsilon)
    if noise == RATE_BY_SIGMA:
        of_eight = chosen(optimizer, task, EIGHT, epsilon).noise_multiplier
        values["learning_rate"] *= choice.noise_multiplier / of_eight
        optimizer = candidates.get(rule).make(info, **values)
    optimizer = type(optimizer).from_config(
        optimizer.get_config()
        | {"noise": choice.mechanism, "noise_multiplier": choice.noise_multiplier}
    )
    model = dp.make_private(task.build())
    model.compile(optimizer, task.loss, metrics=[task.score] if task.score else [])
    model.fit(batches(task, choice), verbose=0)
    spent = model.ledger.epsilon(choosing.DELTA)
    assert spent <= epsilon, spent
    return {
        "groups": choice.sampling.groups,
        "steps": choice.steps,
        "mechanism": type(choice.mechanism).__name__,
        "noise_multiplier": choice.noise_multiplier,
        "error": choice.error,
        "score": runs.score(task, model, task.test),
    }


def table(rows):
    """The mean score, and its mean difference from that of eight bands in the same pair."""
    lines = [
        "| task | optimizer | ε | noise | groups | score | score, 8 bands | difference |",
        "|---" * 8 + "|",
    ]
    of_setting = {}
    for row in rows:
        setting = row["task"], row["rule"], float(row["epsilon"]), row["noise"]
        of_setting.setdefault(setting, {})[row["seed"]] = row
    for (task, rule, epsilon, noise), found in sorted(of_setting.items()):
        eight = of_setting.get((task, rule, epsilon, EIGHT), {})
        seeds = sorted(found.keys() & eight.keys())
        if noise == EIGHT or len(seeds) < 2:
            continue
        scores = np.float64([[part[seed]["score"] for seed in seeds] for part in (found, eight)])
        difference = scores[0] - scores[1]
        error = difference.std(ddof=1) / len(seeds) ** 0.5
        lines.append(
            f"| {task} | {rule.removesuffix(', banded noise')} | {epsilon:g} | {noise} | "
            f"{found[seeds[0]]['groups']} | {scores[0].mean():.4f} | {scores[1].mean():.4f} | "
            f"{difference.mean():+.4f} ± {error:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=choosing.TASKS, default=[*choosing.TASKS])
    parser.add_argument("--epsilons", nargs="+", type=float, default=choosing.EPSILONS)
    parser.add_argument(
        "--noises", nargs="+", default=(EIGHT, PLANNED, HORIZON),
        help='or other numbers: "4 bands", "planned, horizon 40"; or "planned, rate by σ"',
    )  # fmt: skip
    parser.add_argument("--rule", help="a candidate of dp_keras_opt.tuning with banded noise")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("output/planned_noise"))
    options = parser.parse_args()
    tasks = {name: choosing.TASKS[name]() for name in options.tasks}
    settings = (
        (name, options.rule or RULES[name], epsilon, noise, seed)
        for seed, name, epsilon, noise in itertools.product(
            range(options.seeds), options.tasks, options.epsilons, options.noises
        )
    )
    text = table(
        results.completed(
            options.output / "results.csv", KEY, settings, functools.partial(run, tasks)
        )
    )
    (options.output / "planned_noise.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
