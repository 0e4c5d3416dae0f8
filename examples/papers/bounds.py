"""How much noise could bounds save that each weight has of its own?

    python examples/papers/bounds.py        # some minutes; goes on where it was interrupted

AdaClip learns such bounds from noisy means. Here they follow from the gradients themselves: of
2,000 examples, clipped, whose variance in weight j of d is s_j. Around the mean, one bound for all
weights at which the expected squared length is 1 has noise of d·Σ s_j in all, up to σ²; the best
bounds have (Σ √s_j)² (AdaCliP, arXiv:1908.07643). The ratio is what is printed, at the initial
weights and after training by momentum at ε = 3. It is an upper bound: nothing private may know it,
and of rare features 2,000 examples know too little.

Tasks are those of later.py. Writes bounds.csv to output/papers/bounds.
"""

import functools

import borders
import choosing
import keras
import numpy as np
import report

import dp_keras_opt as dp

#: And the rates at which momentum went best at ε = 3: docs/explanation/geometries.
TASKS = {"ratings": 0.821, "clothes": 0.821, "text": 0.26, "tabular": 0.0821, "incomes": 2.6}


def saving(gradients):
    """d·Σ s_j over (Σ √s_j)².

    Args:
        gradients: of examples, an iterable of (d,).
    """
    count, total, squares = 0, 0.0, 0.0
    for gradient in gradients:
        gradient = np.float64(gradient)
        count, total, squares = count + 1, total + gradient, squares + gradient**2
    variances = np.maximum(squares / count - (total / count) ** 2, 0.0)
    return len(variances) * variances.sum() / np.sqrt(variances).sum() ** 2


def saving_at(task, at, rate, count, seed):
    """That of `count` examples of the task, at the "start" or the "end" of a training."""
    if at == "start":
        keras.utils.set_random_seed(seed)
        model = task.build()
    else:
        momentum = dp.tuning.get("DPSGD, momentum")
        model = dp.tuning.runs.train(task, momentum, {"learning_rate": rate}, 3.0, 1e-6)
    return {"test": f"{saving(borders.clipped_gradients(model, task, count)):.3g}"}


def main():
    options = report.parser(__doc__, "bounds").parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"bounds{'-quick' * options.quick}.csv"
    count = 50 if options.quick else 2_000
    for name, rate in TASKS.items():
        task = choosing.EVERY[name]()
        for at in ("start", "end"):
            compute = functools.partial(saving_at, task, at, rate, count, options.seed)
            report.remembered(path, {"task": name, "at": at}, compute)


if __name__ == "__main__":
    main()
