"""Before training: `epsilon`, what it would cost, and `calibrate`, what a budget affords."""

import math
import textwrap

import dp_keras_opt as dp
from dp_keras_opt.accounting.privacy_statement import rounded_up
from dp_keras_opt_cli import runs
from dp_keras_opt_cli.results import CommandError, Result, UsageError


def epsilon(arguments):
    """The `Result` of `epsilon`."""
    runs.need(arguments, "length", "noise_multiplier")
    sampling, steps, optimizer = planned_run(arguments)
    spent = dp.accounting.epsilon(optimizer, sampling, steps, arguments.delta, arguments.accountant)
    return _result(arguments, optimizer, sampling, steps, spent)


def planned_run(arguments):
    """(sampling, steps, optimizer) of a run that the arguments describe completely."""
    sampling = runs.make_sampling(arguments)
    steps = runs.make_steps(arguments, sampling)
    optimizer = runs.make_optimizer(
        arguments, sampling.batch_size, arguments.noise_multiplier, steps
    )
    return sampling, steps, optimizer


def calibrate(arguments):
    """The `Result` of `calibrate`."""
    finders = {
        "noise multiplier": (arguments.noise_multiplier is None, _noise_multiplier),
        "steps": (arguments.steps is None and arguments.epochs is None, _steps),
        "batch size": (
            arguments.batch_size is None and not runs.takes_all(arguments),
            _batch_size,
        ),
    }
    unknown = [name for name, (missing, _) in finders.items() if missing]
    if len(unknown) != 1:
        raise UsageError(
            "Leave out exactly one of --noise-multiplier, --steps (or --epochs) and --batch-size: "
            f"that is what is found. Left out here: {', '.join(unknown) or 'none of them'}."
        )
    (name,) = unknown
    sampling, steps, optimizer = finders[name][1](arguments)
    spent = dp.accounting.epsilon(optimizer, sampling, steps, arguments.delta, arguments.accountant)
    return _result(arguments, optimizer, sampling, steps, spent, found=name)


def _noise_multiplier(arguments):
    sampling, steps, optimizer = planned_run(arguments)
    dp.accounting.calibrate(
        optimizer, sampling, steps, arguments.epsilon, arguments.delta, arguments.accountant
    )
    return sampling, steps, optimizer


def _steps(arguments):
    sampling = runs.make_sampling(arguments)
    optimizer = runs.make_optimizer(arguments, sampling.batch_size, arguments.noise_multiplier)
    steps = dp.accounting.Ledger.of(optimizer, sampling, 0).affordable_steps(
        arguments.epsilon, arguments.delta, arguments.accountant
    )
    if not steps:
        raise CommandError(
            f"epsilon={arguments.epsilon:g} cannot be met with this noise: one step exceeds it "
            "already. Raise --epsilon, --delta or --noise-multiplier, or lower --batch-size."
        )
    return sampling, steps, optimizer


def _batch_size(arguments):
    smallest = runs.make_sampling(arguments, batch_size=1)
    template = runs.make_optimizer(arguments, 1, arguments.noise_multiplier, arguments.steps)
    size = dp.accounting.affordable_batch_size(
        template, smallest, arguments.epsilon, arguments.delta, arguments.accountant,
        steps=arguments.steps, epochs=arguments.epochs,
    )  # fmt: skip
    arguments.batch_size = size
    return planned_run(arguments)


def _result(arguments, optimizer, sampling, steps, spent, found=None):
    releases = sum(not release.is_public for release in optimizer.releases)
    data = {
        "epsilon": spent,
        "delta": arguments.delta,
        "accountant": arguments.accountant,
        "noise_multiplier": optimizer.noise_multiplier,
        "batch_size": sampling.batch_size,
        "steps": steps,
        "optimizer": type(optimizer).__name__,
        "releases_per_step": releases,
        "sampling": sampling.get_config(),
    }
    shown = "infinite, NO DIFFERENTIAL PRIVACY," if math.isinf(spent) else rounded_up(spent)
    lines = [
        f"epsilon = {shown} at delta = {arguments.delta:g}",
        f"{data['optimizer']}: {steps} steps with {releases} private release"
        f"{'s' * (releases != 1)} each, noise multiplier {optimizer.noise_multiplier:.6g}, "
        f"expected batch size {sampling.batch_size}.",
        sampling.describe(),
    ]
    if found is not None:
        data = {"found": found.replace(" ", "_"), "budget": arguments.epsilon, **data}
        value = data[data["found"]]
        if isinstance(value, float):  # up, so that it still meets the budget
            value = f"{math.ceil(value * 1e6) / 1e6:.6f}"
        lines.insert(0, f"{found} = {value}")
    return Result(data, "\n".join(textwrap.fill(line, 80) for line in lines))
