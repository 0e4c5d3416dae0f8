"""What was spent: `ledger`; and `statement` and `risk`, which also speak of a planned run."""

import dp_keras_opt as dp
from dp_keras_opt.tables import aligned
from dp_keras_opt_cli import models, plan, runs
from dp_keras_opt_cli.results import Result, UsageError

_OF_A_PLAN = ("num_examples", "batch_size", "steps", "epochs", "noise_multiplier")


def statement(arguments):
    """The `Result` of `statement`."""
    data, text = _stated(arguments, _spent_or_planned(arguments))
    return Result(data, text)


def risk(arguments):
    """The `Result` of `risk`."""
    found = _ledger(_spent_or_planned(arguments)).risk(arguments.accountant)
    return Result({"accountant": arguments.accountant, **found.to_dict()}, str(found))


def _spent_or_planned(arguments):
    """What FILE has spent, or the ledger of the run that is described instead."""
    if arguments.file is not None:
        if any(getattr(arguments, name) is not None for name in _OF_A_PLAN):
            raise UsageError("Give FILE or a planned run (--num-examples), and not both.")
        return models.spent(arguments.file, arguments.modules)
    if arguments.num_examples is None:
        raise UsageError("Give FILE, or a planned run: --num-examples and so on.")
    runs.need(arguments, "length", "noise_multiplier")
    sampling, steps, optimizer = plan.planned_run(arguments)
    return dp.accounting.Ledger.of(optimizer, sampling, steps)


def ledger(arguments):
    """The `Result` of `ledger`."""
    spent = models.spent(arguments.file, arguments.modules)
    data, text = _stated(arguments, spent)
    segments = [_segment(segment) for segment in _ledger(spent).segments if segment.steps]
    rows = [
        [
            str(segment["steps"]),
            ", ".join(
                f"{release['statistic']} sigma={release['multiplier']:.6g} {release['mechanism']}"
                for release in segment["releases"]
            ),
            f"{segment['sampling']['batch_size']} of {segment['sampling']['num_examples']}",
            segment["sampling"]["kind"],
            segment["run"][:8],
        ]
        for segment in segments
    ]
    listed = aligned(["steps", "released at each", "batch", "sampling", "run"], rows)
    data |= {"file": str(arguments.file), "segments": segments}
    return Result(data, f"{listed}\n\n{text}" if rows else text)


def _ledger(spent):
    return spent.ledger if isinstance(spent, dp.DPModel) else spent


def _stated(arguments, spent):
    options, found = (arguments.delta, arguments.accountant), _ledger(spent)
    segments = [segment for segment in found.of_data_set() if segment.steps]
    one = len(dp.accounting.accountant.composable(segments)) == 1 or not found.segments
    data = {  # of steps that do not compose, the statement has a guarantee each
        "epsilon": found.epsilon(*options) if one else None,
        "epsilon_as_planned": found.epsilon_as_planned(*options) if one else None,
        "delta": arguments.delta,
        "accountant": arguments.accountant,
        "steps": found.steps,
        "statement": spent.statement(*options, arguments.group_size),
    }
    return data, data["statement"].rstrip("\n")


def _segment(segment):
    return {
        "run": segment.run,
        "steps": segment.steps,
        "first_step": segment.first_step,
        "clip_norm": segment.clip_norm,
        "releases": [
            {
                "statistic": release.statistic,
                "multiplier": float(release.multiplier),
                "mechanism": type(release.mechanism).__name__,
            }
            for release in segment.releases
        ],
        "sampling": segment.sampling.get_config(),
        "privacy_filter": segment.filter and segment.filter.get_config(),
    }
