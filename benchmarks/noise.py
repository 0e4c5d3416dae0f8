"""The noise multiplier that each library asks for, for the same guarantee of the same training.

    python3.11 benchmarks/noise.py

For ten settings (n, B, T, ε, δ) of Poisson sampling, add_or_remove_one: what this library asks for
by RDP, its default before, and by "auto"; and what TF Privacy, Opacus and jax-privacy find by their
own functions for that, each in an environment of its own in `.bench/`, as `compare.py` makes them.
ε of each is then bounded from below and from above by dp_accounting's privacy loss distributions on
a grid ten times as fine: a σ whose lower bound exceeds the target is too small.

Writes `output/noise/noise.csv` and `noise.md`.
"""

import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

from contenders import SETTINGS as VARIABLES
from contenders import environment, say


class Setting(NamedTuple):
    """A training, and the guarantee that it is to have."""

    name: str
    num_examples: int
    batch_size: int
    steps: int
    epsilon: float
    delta: float

    @property
    def sampling_probability(self):
        return self.batch_size / self.num_examples


SETTINGS = [
    Setting("clothes", 53_460, 256, 160, 1.0, 1e-6),
    Setting("ratings", 80_000, 1024, 1580, 3.0, 1e-6),
    Setting("digits, 15 epochs", 60_000, 256, 3516, 3.0, 1e-5),
    Setting("digits, large batches", 60_000, 4096, 600, 1.0, 1e-5),
    Setting("small pictures", 50_000, 4096, 2500, 8.0, 1e-5),
    Setting("large pictures", 1_281_167, 16_384, 72_000, 8.0, 8e-7),
    Setting("text, fine-tuning", 42_061, 1024, 410, 3.0, 1.2e-5),
    Setting("table, few rows", 2000, 100, 400, 1.0, 1e-4),
    Setting("all rows in each batch", 1000, 1000, 100, 1.0, 1e-4),
    Setting("tiny delta", 1_000_000, 1000, 1000, 0.5, 1e-12),
]


# What each library is asked, in its own environment. Imports are in the functions, since each
# environment has one of these libraries.


def dp_keras_opt(setting, accountant):
    import dp_keras_opt as dp

    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=setting.batch_size)
    sampling = dp.accounting.Sampling.poisson(setting.num_examples, setting.batch_size)
    return dp.accounting.calibrate(
        optimizer, sampling, setting.steps, setting.epsilon, setting.delta, accountant
    )


def tf_privacy(setting):
    sys.skip_tf_privacy_import = True  # or it imports tensorflow_estimator, which is no more
    from tensorflow_privacy.privacy.analysis import compute_noise_from_budget_lib

    return compute_noise_from_budget_lib.compute_noise(
        setting.num_examples, setting.batch_size, setting.epsilon,
        setting.steps * setting.sampling_probability, setting.delta, 1e-3,
    )  # fmt: skip


def opacus(setting):
    from opacus.accountants.utils import get_noise_multiplier

    return get_noise_multiplier(
        target_epsilon=setting.epsilon, target_delta=setting.delta, steps=setting.steps,
        sample_rate=setting.sampling_probability, accountant="prv",
        epsilon_tolerance=1e-3 * setting.epsilon,
    )  # fmt: skip


def jax_privacy(setting):
    from jax_privacy.accounting import accountants, analysis, calibrate

    return calibrate.calibrate_noise_multiplier(
        target_epsilon=setting.epsilon,
        accountant=analysis.DpsgdTrainingAccountant(accountants.PldAccountantConfig()),
        batch_sizes=setting.batch_size, num_updates=setting.steps,
        num_samples=setting.num_examples, target_delta=setting.delta, tol=1e-4,
    )  # fmt: skip


#: Name of a column: environment, and the function that is asked there.
ASKED = {
    "this library, RDP": ("keras", lambda setting: dp_keras_opt(setting, "rdp")),
    "this library, auto": ("keras", lambda setting: dp_keras_opt(setting, "auto")),
    "TF Privacy (RDP)": ("tf_privacy", tf_privacy),
    "Opacus (PRV)": ("opacus", opacus),
    "jax-privacy (PLD)": ("jax_privacy", jax_privacy),
}


def answer(name):
    """Prints one JSON object for each setting: σ, or why there is none, and the seconds it took."""
    for setting in SETTINGS:
        start = time.perf_counter()
        try:
            found = {"sigma": float(ASKED[name][1](setting))}
        except Exception as error:  # of any library: its text stands in the table
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
        found["seconds"] = time.perf_counter() - start
        print("answer", json.dumps({"setting": setting.name} | found), flush=True)


def ask(name, limit):
    """The answers of a library by setting; what it had not answered after `limit` s is missing."""
    say(f"asking {name}")
    try:
        out = in_environment(ASKED[name][0], ["--answer", name], timeout=limit)
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode()
    rows = (line.removeprefix("answer ") for line in out.splitlines() if line.startswith("answer "))
    return {row["setting"]: row for row in map(json.loads, rows)}


def in_environment(name, arguments, **options):
    """What this script prints, run with the arguments in an environment of `contenders.py`."""
    command = [environment(name), __file__, *arguments]
    variables = os.environ | VARIABLES["cpu"]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=True, **options
    )
    return done.stdout


def bounded(path, interval):
    """Prints the rows of a CSV file with bounds on ε, as JSON."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    by_name = {setting.name: setting for setting in SETTINGS}
    for row in rows:
        if row["sigma"]:
            found = bounds(by_name[row["name"]], float(row["sigma"]), interval)
            row["lower"], row["upper"] = found
    print(json.dumps(rows))


def bounds(setting, sigma, interval):
    """Bounds on the true ε, by dp_accounting on a grid of losses of this interval."""
    from dp_accounting.pld import privacy_loss_distribution as distributions

    def epsilon(pessimistic):
        step = distributions.from_gaussian_mechanism(
            sigma, sampling_prob=setting.sampling_probability, pessimistic_estimate=pessimistic,
            value_discretization_interval=interval, use_connect_dots=pessimistic,
        )  # fmt: skip
        return step.self_compose(setting.steps).get_epsilon_for_delta(setting.delta)

    return epsilon(False), epsilon(True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answer", choices=ASKED, help=argparse.SUPPRESS)
    parser.add_argument("--bound", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for each library")
    parser.add_argument("--interval", type=float, default=1e-5, help="of the finer grid of losses")
    options = parser.parse_args()
    if options.answer:
        return answer(options.answer)
    if options.bound:
        return bounded(options.bound, options.interval)
    answers = {name: ask(name, options.limit) for name in ASKED}
    none = {"error": "no answer in time"}
    rows = [
        setting._asdict() | {"library": name} | answers[name].get(setting.name, none)
        for setting in SETTINGS
        for name in ASKED
    ]
    output = pathlib.Path(__file__).resolve().parents[1] / "output" / "noise"
    output.mkdir(parents=True, exist_ok=True)
    write(rows, output / "noise.csv")
    say("bounding each")
    found = in_environment(
        "keras", ["--bound", output / "noise.csv", "--interval", f"{options.interval}"]
    )
    rows = json.loads(found.splitlines()[-1])
    write(rows, output / "noise.csv")
    text = table(rows)
    (output / "noise.md").write_text(text, encoding="utf-8")
    print(text)


def write(rows, path):
    columns = [*Setting._fields, "library", "sigma", "lower", "upper", "seconds", "error"]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)


def table(rows):
    """σ of each library, in bold where it is proved too small for its ε."""
    lines = [
        f"| setting | n | B | T | ε | δ | {' | '.join(ASKED)} |",
        "|---" * (6 + len(ASKED)) + "|",
    ]
    for setting in SETTINGS:
        own = {row["library"]: row for row in rows if row["name"] == setting.name}
        cells = [_cell(own[name], setting) for name in ASKED]
        _, n, size, steps, epsilon, delta = setting
        lines.append(
            f"| {setting.name} | {n} | {size} | {steps} | {epsilon:g} | {delta:g} | "
            f"{' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def _cell(row, setting):
    if not row.get("sigma"):
        return "none"
    text, lower = f"{float(row['sigma']):.4f}", float(row["lower"])
    return f"**{text}** (ε > {lower:.4f})" if lower > setting.epsilon else text


if __name__ == "__main__":
    sys.exit(main())
