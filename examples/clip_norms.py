"""A clip norm that finds itself, beside constants and automatic clipping: the evidence of a page.

    python examples/clip_norms.py                    # goes on where it was interrupted
    python examples/clip_norms.py --tasks tabular --optimizers DPAdam
    python examples/clip_norms.py --quick            # a minute, to try it out

On the tasks of choosing.py, at ε = 3: `DPAdam` and `DPSGD` with momentum, each with C = 0.1, 1 and
10, of which validation data choose; with `normalize=True`; and with `clipping.Quantile(0.5)`, whose
C nobody chose. Of each, four learning rates are tried (see `dp.tuning.compare` for the protocol),
from the range of `dp.tuning.CANDIDATES`: for momentum over C, and over 1 where C finds itself.

Writes results-TASK.csv (every run) and TASK.md (a table) to output/clip_norms.
"""

import argparse
import pathlib

from choosing import TASKS, compared

import dp_keras_opt as dp

CLIP_NORMS = {
    "C = 0.1": {"clip_norm": 0.1},
    "C = 1": {"clip_norm": 1.0},
    "C = 10": {"clip_norm": 10.0},
    "normalize=True": {"clip_norm": 1.0, "normalize": True},
    "Quantile(0.5)": {"clip_norm": dp.clipping.Quantile(0.5)},
}

#: The class, and its arguments, by the name in `dp.tuning.CANDIDATES`.
OPTIMIZERS = {
    "DPAdam": ("DPAdam", {"beta_2": 0.99}),
    "DPSGD, momentum": ("DPSGD", {"momentum": 0.9}),
}


def candidates(names):
    """Each of these optimizers with each of the clip norms."""
    for optimizer in names:
        cls, own = OPTIMIZERS[optimizer]
        space = dp.tuning.CANDIDATES[optimizer].space
        for name, arguments in CLIP_NORMS.items():
            per_norm = cls == "DPSGD" and isinstance(arguments["clip_norm"], float)
            yield dp.tuning.candidate(
                f"{optimizer}: {name}", cls, space=space, per_norm=per_norm, **own, **arguments
            )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="little of everything, to try it out")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("output/clip_norms"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.tasks:
        compared(name, options, list(candidates(options.optimizers)), [3.0])


if __name__ == "__main__":
    main()
