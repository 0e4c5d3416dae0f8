"""Ledgers say which version wrote them, and those of a later one are refused."""

import json

import keras
import numpy as np
import pytest

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, Sampling, versions

POISSON = Sampling.poisson(1000, 50)
MAJOR, MINOR, PATCH = map(int, dp.__version__.split("."))
LATER = [
    {"format": versions.FORMAT + 1, "library": dp.__version__},
    {"format": versions.FORMAT, "library": f"{MAJOR}.{MINOR + 1}.0"},
    {"format": versions.FORMAT, "library": f"{MAJOR + 1}.0.0.dev1"},
]
EARLIER = [
    {},
    {"format": versions.FORMAT},
    {"format": versions.FORMAT, "library": f"{MAJOR}.{MINOR}.{PATCH + 7}"},
    {"format": versions.FORMAT, "library": "0.0.9"},
]


def both(stamp):
    """Matches a message that names the version of the stamp and then ours."""
    theirs, ours = (
        rf"{each['library']} \(ledger format {each['format']}\)" for each in (stamp, versions.STAMP)
    )
    return f"{theirs}.*{ours}"


def test_what_is_written_says_its_version(make_ledger, gaussians, tmp_path):
    assert json.loads(make_ledger(POISSON, 5).to_json()).items() >= versions.STAMP.items()
    ledger = Ledger(tmp_path / "spent.jsonl")
    ledger.begin(gaussians(1.0), POISSON)
    ledger.reserve(3)
    first, *rest = (tmp_path / "spent.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(first).items() >= versions.STAMP.items() == {
        "format": 1, "library": dp.__version__
    }.items()  # fmt: skip


@pytest.mark.parametrize("stamp", LATER)
def test_text_of_a_later_version_is_refused(make_ledger, stamp):
    content = json.loads(make_ledger(POISSON, 5).to_json()) | stamp
    with pytest.raises(ValueError, match=both(stamp)):
        Ledger.from_json(json.dumps(content))


@pytest.mark.parametrize("stamp", EARLIER)
def test_text_of_this_and_earlier_versions_is_read(make_ledger, stamp):
    ledger = make_ledger(POISSON, 5)
    content = json.loads(ledger.to_json())
    content.pop("library")
    again = Ledger.from_json(json.dumps(content | stamp))
    assert again.segments == ledger.segments


def stamped(path, stamp):
    """The ledger file, with this stamp in the place of its own in the first record."""
    first, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
    record = {k: v for k, v in json.loads(first).items() if k not in versions.STAMP}
    path.write_text("".join([json.dumps(record | stamp) + "\n", *rest]), encoding="utf-8")


@pytest.mark.parametrize("stamp", LATER)
def test_a_file_of_a_later_version_is_refused(gaussians, tmp_path, stamp):
    path = tmp_path / "spent.jsonl"
    ledger = Ledger(path)
    ledger.begin(gaussians(1.0), POISSON)
    ledger.reserve(3)
    ledger.unlock()
    stamped(path, stamp)
    before = path.read_bytes()
    for opened in (Ledger, Ledger.read):
        with pytest.raises(ValueError, match=both(stamp)):
            opened(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("stamp", EARLIER)
def test_a_file_of_this_and_earlier_versions_goes_on(gaussians, tmp_path, stamp):
    path = tmp_path / "spent.jsonl"
    ledger = Ledger(path)
    ledger.begin(gaussians(1.0), POISSON)
    ledger.reserve(3)
    ledger.unlock()
    stamped(path, stamp)
    assert Ledger.read(path).segments == Ledger(path).segments == ledger.segments


def test_a_model_of_a_later_version_is_refused(tmp_path, monkeypatch):
    inputs = keras.Input((3,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    optimizer = dp.optimizers.DPSGD(0.1, clip_norm=1.0, batch_size=4, noise_multiplier=1.0)
    model.compile(optimizer, "mse")
    data = np.zeros((12, 3), "float32"), np.zeros((12, 1), "float32")
    model.fit(dp.data.poisson_batches(data, 4), verbose=0)
    later = {"format": 2, "library": f"{MAJOR}.{MINOR + 1}.0"}
    with monkeypatch.context() as patched:
        patched.setattr(versions, "STAMP", later)
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match=both(later)):
        keras.models.load_model(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=both(later)):
        model.load_weights(tmp_path / "model.weights.h5")


def test_unlock_was_called_release(gaussians, tmp_path):
    ledger = Ledger(tmp_path / "spent.jsonl")
    with pytest.warns(FutureWarning, match="unlock"):
        ledger.release()
    Ledger(tmp_path / "spent.jsonl").unlock()
