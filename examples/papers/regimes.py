"""Where does which private optimizer win? A map, from quadratics whose optimum is known.

    python examples/papers/regimes.py              # an hour; goes on if interrupted
    python examples/papers/regimes.py --quick      # a few seconds: little of everything

Eight methods, each at its best settings, on quadratics (see quadratics.py) of 1,000 and a million
weights, well and badly conditioned, whose examples are dense or sparse and whose loss lies in steep
directions or in all alike; after 100, 1,000 and 10,000 steps, at five levels of noise. Settings are
the best of a grid.

- momentum: SGD with 0.9.
- filtered: SGD behind DOPPLER's first-order filter.
- uneven: momentum, with noise that falls over the steps, at the same Σ 1/σ_t².
- accelerated: Nesterov's momentum, of 0.9, 0.99 or 0.999.
- correlated: momentum with the noise of 8 bands that is planned for a horizon of an eighth of the
  steps. Batches come in turns, for which the accountant takes a larger σ: so the map has what it
  would win without, and the price at which nothing is left of it.
- bias-corrected Adam, scale-then-privatize, and delayed (DP²-RMSProp).

Writes regimes-all.csv (all that was found), regimes.csv and .md (a table), and regimes.png to
output/papers/regimes.
"""

import csv
import itertools

import numpy as np
import quadratics
import report
from scipy import optimize

from dp_keras_opt.noise import BandedMatrix

#: (weights, the largest curvature over the smallest): curvatures fall as the third root of their
#: rank, as 1/rank, and as the rank to the −5/3.
SPECTRA = ((10**3, 1e1), (10**3, 1e3), (10**3, 1e5), (10**6, 1e2), (10**6, 1e6), (10**6, 1e10))
NOISES = (1e-4, 4e-4, 1.6e-3, 6.4e-3, 2.56e-2)
STEPS = (100, 1_000, 10_000)
RATES = 2.0 ** np.arange(-32, 5)  # in units of 1/h_max
FIRST_RATES = 2.0 ** np.array([-28, -22, -17, -13, -9, -6, -3])  # of the phase that learns v
ADAPTIVE_RATES = 2.0 ** np.arange(-17, 0.0)  # in units of the largest distance
SHARES = (0.1, 0.5)
LEARNED = 0.9  # of the loss at the start
FALLS = (3.0, 10.0, 30.0, 100.0)  # the first variance over the last
METHODS = ("momentum", "filtered", "uneven", "accelerated", "correlated", "bias-corrected",
           "scale-then-privatize", "delayed")  # fmt: skip
PLACE = ("sparse", "condition", "size", "flat", "noise")
CLAIM = "Each of the five papers shows its method ahead of plain private training."


def planned(steps):
    """The coefficients of 8 bands for a horizon of an eighth of the steps."""
    return BandedMatrix(steps, min(8, steps), momentum=0.9, horizon=steps / 8).coefficients


def falling(steps, fall):
    """σ_t over σ: variances that fall geometrically, at the same Σ 1/σ_t²."""
    variances = fall ** -np.linspace(0, 1, steps)
    return np.sqrt(variances * np.mean(1 / variances))


class Linear:
    """The best losses of linear methods on problems that have these curvatures.

    Their responses do not depend on the noise, and are found once.
    """

    def __init__(self, curvatures, steps):
        self.steps = steps
        self._responses = {
            name: quadratics.impulse_responses(rule, RATES / max(curvatures), curvatures, steps)
            for name, rule in {
                "momentum": quadratics.momentum(0.9),
                "filtered": quadratics.low_pass("first_order_v1"),
                0.9: quadratics.momentum(0.9, nesterov=True),
                0.99: quadratics.momentum(0.99, nesterov=True),
                0.999: quadratics.momentum(0.999, nesterov=True),
            }.items()
        }

    def losses(self, problem):
        """{method: (the loss, the setting)}."""

        def best(name, **noise):
            losses = quadratics.linear_losses(problem, self._responses[name], **noise)
            return float(losses.min()), f"rate {RATES[losses.argmin()]:.3g}"

        def best_of(settings, losses):
            value, setting = min(zip(losses, settings, strict=True))
            return value[0], f"{value[1]}, {setting:g}"

        return {
            "momentum": best("momentum"),
            "filtered": best("filtered"),
            "uneven": best_of(
                FALLS, [best("momentum", levels=falling(self.steps, fall)) for fall in FALLS]
            ),
            "accelerated": best_of((0.9, 0.99, 0.999), map(best, (0.9, 0.99, 0.999))),
            "correlated": best("momentum", coefficients=planned(self.steps)),
        }

    def break_even(self, problem):
        """The price, σ over that of independent noise, at which correlated noise gains nothing."""
        responses = self._responses["momentum"]
        goal = quadratics.linear_losses(problem, responses).min()

        def excess(log_price):
            losses = quadratics.linear_losses(
                problem, responses, planned(self.steps), np.exp(log_price)
            )
            return np.log(losses.min() / goal)

        return float(np.exp(optimize.brentq(excess, -1.0, 4.0, xtol=1e-3)))


def simulated(problem, steps, seed):
    """{method: {steps: (the loss, the setting)}} of those that have no closed form."""
    farthest = max(problem.distances)
    grid = np.array(list(itertools.product(ADAPTIVE_RATES * farthest, SHARES)))
    runs = {
        "bias-corrected": {"rate": ADAPTIVE_RATES * farthest},
        "scale-then-privatize": {"rate": grid[:, 0], "share": grid[:, 1]},
    }
    found = {}
    for name, settings in runs.items():
        noises = quadratics.draws(problem, max(steps), seed)
        squares = quadratics.adam(problem, settings, noises)
        found[name] = {
            t: _best(problem, e, settings) for t, e in enumerate(squares, 1) if t in steps
        }
    found["delayed"] = {}
    plain = FIRST_RATES / max(problem.curvatures)
    grid = np.array(list(itertools.product(plain, ADAPTIVE_RATES[2::3] * farthest, SHARES[1:])))
    for length in steps:
        ends = []
        for delay in (length // 8, length // 4):
            names = ("rate", "adaptive_rate", "share")
            settings = dict(zip(names, grid.T, strict=True)) | {"delay": [delay] * len(grid)}
            noises = quadratics.draws(problem, length, seed)
            *_, squares = quadratics.delayed(problem, settings, noises)
            ends.append(_best(problem, squares, settings))
        found["delayed"][length] = min(ends)
    return found


def _best(problem, squares, settings):
    loss, place = quadratics.best(problem, squares)
    return loss, ", ".join(f"{name} {values[place]:.3g}" for name, values in settings.items())


def found_at(place, linear, seed):
    """One row for each number of steps and method, of a place in the map."""
    sparse, condition, size, flat, noise = place
    problem = quadratics.power_law(size, condition, flat, noise, sparse)
    adaptive = simulated(problem, STEPS, seed)
    for steps in STEPS:
        results = linear[steps].losses(problem)
        results |= {name: ends[steps] for name, ends in adaptive.items()}
        for method in METHODS:
            loss, setting = results[method]
            row = dict(zip(PLACE, place, strict=True))
            price = linear[steps].break_even(problem) if method == "correlated" else ""
            yield row | {
                "steps": steps, "method": method, "loss": f"{loss:.5g}", "setting": setting,
                "break_even": price and f"{price:.3f}",
            }  # fmt: skip


def all_places(quick=False):
    """Every place in the map, those with the same curvatures together."""
    places = itertools.product(SPECTRA, (False, True), (False, True), NOISES)
    places = [(sparse, c, size, flat, noise) for (size, c), sparse, flat, noise in places]
    return places[4:60:11] if quick else places


def run(path, places, seed):
    """All rows; a file that is there already goes on."""
    rows = []
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    there = {tuple(row[name] for name in PLACE) for row in rows}
    curvatures = None
    with open(path, "a", newline="", encoding="utf-8") as file:
        for number, place in enumerate(places, 1):
            if tuple(map(str, place)) in there:
                continue
            if curvatures != place[1:3]:
                curvatures = place[1:3]
                h = quadratics.power_law(place[2], place[1], False, 1.0, False).curvatures
                linear = {steps: Linear(h, steps) for steps in STEPS}
            new = list(found_at(place, linear, seed))
            writer = csv.DictWriter(file, new[0])
            if not rows:
                writer.writeheader()
            writer.writerows(new)
            file.flush()
            rows += [{name: str(value) for name, value in row.items()} for row in new]
            print(f"{number} of {len(places)} places", flush=True)
    return rows


def _where(row):
    """The place of a row, and its steps."""
    return *(row[name] for name in PLACE), int(row["steps"])


def ratios(rows):
    """{(place, steps): {method: its loss over that of momentum}}."""
    cells = {}
    for row in rows:
        cells.setdefault(_where(row), {})[row["method"]] = float(row["loss"])
    return {
        where: {method: loss / cell["momentum"] for method, loss in cell.items()}
        for where, cell in cells.items()
    }


def of_momentum(rows):
    """{(place, steps): the loss of momentum}, of 1 at the start."""
    return {_where(row): float(row["loss"]) for row in rows if row["method"] == "momentum"}


def learned(rows):
    """The ratios where anything is learned: where some method leaves no more than 0.9."""
    losses = of_momentum(rows)
    return {
        where: cell
        for where, cell in ratios(rows).items()
        if min(cell.values()) * losses[where] <= LEARNED
    }


def table(rows):
    """Medians over the places of each spectrum and kind of examples, where anything is learned."""
    cells, result = learned(rows), []
    prices = {_where(row): float(row["break_even"]) for row in rows if row["break_even"]}
    for sparse, (size, condition) in itertools.product((False, True), SPECTRA):
        kind = str(sparse), str(condition), str(size)
        here = [where for where in cells if where[:3] == kind]
        if not here:
            continue
        medians = {
            method: float(np.median([cells[where][method] for where in here]))
            for method in METHODS[1:]
        }
        result.append(
            {"examples": "sparse" if sparse else "dense", "weights": f"{size:,}",
             "condition": f"{condition:,.0f}", "places": len(here)}
            | {method: f"{median:.2f}" for method, median in medians.items()}
            | {"price": f"{np.median([prices[where] for where in here]):.2f}"}
        )  # fmt: skip
    return result


def verdict(rows):
    """What the whole map says of each method, in words."""
    cells = list(learned(rows).values())
    lines = []
    for method in METHODS[1:]:
        found = np.array([cell[method] for cell in cells])
        better, worse = np.mean(found < 0.9), np.mean(found > 1.1)
        lines.append(
            f"{method}: {np.median(found):.2f} of the loss of momentum in the median, from "
            f"{found.min():.2f} to {found.max():.3g}; better by a tenth in {better:.0%} of "
            f"{len(found)} places, worse in {worse:.0%}"
        )
    prices = [float(row["break_even"]) for row in rows if row["break_even"]]
    lines.append(
        f"correlated noise is worth its price up to {min(prices):.2f} to {max(prices):.2f} times "
        f"the σ of independent noise (median {np.median(prices):.2f})"
    )
    return "\n\n" + "\n".join(f"- {line}." for line in lines)


def plot(rows, path):
    """Who wins without correlated noise, by how much, and up to which price correlation pays."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    names = [method for method in METHODS if method != "correlated"]
    colours = ["0.85", "C9", "C1", "C2", "C4", "C0", "C3"]
    cells, losses = ratios(rows), of_momentum(rows)
    kinds = list(itertools.product(("False", "True"), ("False", "True")))
    figure, axes = plt.subplots(
        len(kinds), len(SPECTRA), figsize=(13, 9), sharex=True, sharey=True, squeeze=False
    )
    for (i, (sparse, flat)), (j, (size, condition)) in itertools.product(
        enumerate(kinds), enumerate(SPECTRA)
    ):
        panel = axes[i, j]
        winners = np.full((len(NOISES), len(STEPS)), np.nan)
        for (y, noise), (x, steps) in itertools.product(enumerate(NOISES), enumerate(STEPS)):
            where = (sparse, str(condition), str(size), flat, str(noise), steps)
            cell = cells.get(where)
            if cell is None:
                continue
            best = min(names, key=cell.get)
            if cell[best] * losses[where] > LEARNED:
                continue
            winners[y, x] = names.index(best)
            panel.text(x, y, f"{cell[best]:.2f}", ha="center", va="center", fontsize=8)
        panel.imshow(
            winners, ListedColormap(colours), origin="lower", aspect="auto",
            vmin=-0.5, vmax=len(names) - 0.5,
        )  # fmt: skip
        panel.set_xticks(range(len(STEPS)), [f"{steps:,}" for steps in STEPS], fontsize=8)
        panel.set_yticks(range(len(NOISES)), [f"{1 / noise:,.0f}" for noise in NOISES], fontsize=8)
        if i == 0:
            panel.set_title(f"{size:,} weights,\ncondition {condition:,.0f}", fontsize=9)
        if j == 0:
            kind = ("dense", "sparse")[sparse == "True"] + " examples,\nloss "
            panel.set_ylabel(
                kind + ("in steep directions", "in all alike")[flat == "True"] + "\nB/σ"
            )
        if i == len(kinds) - 1:
            panel.set_xlabel("steps", fontsize=9)
    handles = [Patch(color=colour, label=name) for name, colour in zip(names, colours, strict=True)]
    figure.legend(handles=handles, loc="lower center", ncol=len(names), frameon=False)
    figure.suptitle(
        "The best without correlated noise, its loss over that of momentum (white: nothing learned)"
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main():
    options = report.parser(__doc__, "regimes").parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    name = "regimes" + "-quick" * options.quick
    if options.quick:
        global STEPS
        STEPS = STEPS[:1]
    rows = run(options.output / f"{name}-all.csv", all_places(options.quick), options.seed)
    report.write(options.output, name, table(rows), CLAIM, verdict(rows))
    plot(rows, options.output / f"{name}.png")


if __name__ == "__main__":
    main()
