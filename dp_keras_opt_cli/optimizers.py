"""`optimizers`: which there are, what they need, and what they cost."""

from dp_keras_opt.optimizers.catalog import CATALOG
from dp_keras_opt.tables import aligned
from dp_keras_opt_cli.results import Result


def optimizers(arguments):
    """The `Result` of `optimizers`."""
    listed = [
        {
            "name": entry.name,
            "paper": entry.paper,
            "needs": list(entry.needs),
            "releases_per_step": entry.releases_per_step,
            "memory": round(entry.memory, 2),
        }
        for entry in CATALOG
    ]
    rows = [
        [
            each["name"],
            str(each["releases_per_step"]),
            f"{each['memory']:g}",
            ", ".join(each["needs"]),
            each["paper"],
        ]
        for each in listed
    ]
    text = (
        aligned(["name", "releases", "memory", "needs", "paper"], rows)
        + "\n\nreleases: private answers a step, by default. memory: by default, in copies of the"
        "\nweights of a layer of 256 x 256."
    )
    return Result({"optimizers": listed}, text)
