"""`explain`: how a model would be trained privately, and what in it cannot be."""

import dp_keras_opt as dp
from dp_keras_opt_cli import models
from dp_keras_opt_cli.results import CommandError, Result, errors_as


def explain(arguments):
    """The `Result` of `explain`."""
    model = models.load(arguments.model, arguments.modules)
    with errors_as(CommandError):
        private = dp.make_private(model)
    explanation = dp.clipping.explain(private)
    refused = [str(problem) for problem in dp.clipping.problems(private)]
    layers = [served._asdict() for served in explanation]
    data = {"model": str(arguments.model), "layers": layers, "refused": refused}
    return Result(data, str(explanation), " ".join(refused) or None)
