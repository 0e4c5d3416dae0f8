"""The command line: values against dp_accounting, errors and exit codes, whole trainings."""

import csv
import gzip
import importlib
import importlib.metadata
import inspect
import json
import os
import pathlib
import pkgutil
import re
import shlex
import signal
import subprocess
import sys
import time

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_keras_opt as dp
from dp_keras_opt.optimizers.catalog import CATALOG
from dp_keras_opt_cli import arguments, datasets, main, reproduce, results, runs
from dp_keras_opt_cli.parser import make_parser

ROOT = pathlib.Path(__file__).parents[2]
DELTA = 1e-5
#: By RDP, whose figures dp_accounting gives to the last digit.
PLAN = "--num-examples 50000 --batch-size 500 --delta 1e-5 --accountant rdp"
TRAINING = "--loss mse --epsilon 3 --delta 1e-5 --epochs 2 --batch-size 20 --accountant rdp"


@pytest.fixture
def run(capsys):
    """Runs a command; gives the exit code, what is on stdout, and the one line on stderr."""

    def run(command, *more):
        capsys.readouterr()
        code = main([*shlex.split(command), *map(str, more)])
        printed = capsys.readouterr()
        errors = [line for line in printed.err.splitlines() if "error: " in line]
        assert len(errors) == (code != 0) and "Traceback" not in printed.err
        return code, printed.out, printed.err.rstrip("\n")

    return run


@pytest.fixture
def found(run):
    """Runs a command that succeeds, with --json; gives what it found."""

    def found(command, *more):
        code, out, err = run(command, *more, "--json")
        assert code == 0, err
        return json.loads(out)

    return found


def gaussian(multiplier, steps, probability=0.01):
    """Epsilon of Poisson-sampled Gaussians, by dp_accounting alone."""
    accountant = dp_accounting.rdp.RdpAccountant()
    event = dp_accounting.GaussianDpEvent(multiplier)
    if probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(probability, event)
    return accountant.compose(event, steps).get_epsilon(DELTA)


# Planned runs.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--steps 1000", lambda: gaussian(1.0, 1000)),
        ("--epochs 10", lambda: gaussian(1.0, 1000)),
        ("--steps 1000 --adjacency replace-one", lambda: gaussian(0.5, 1000)),
        ("--steps 250 --sampling shuffled", lambda: gaussian(0.5, 3, 1)),
        ("--steps 1000 --sampling full --batch-size 50000", lambda: gaussian(1.0, 1000, 1)),
        ("--steps 80 --sampling cyclic-poisson --groups 4", lambda: gaussian(1.0, 20, 0.04)),
        # Two releases from one batch: as if sigma were sigma / sqrt(2).
        ("--steps 100 --optimizer SubspaceAdagrad", lambda: gaussian(0.5**0.5, 100)),
        (
            "--steps 100 --optimizer dp2rmsprop --set adaptive_clip_norm=1 "
            "--set ablation=extra_query",
            lambda: gaussian(0.5**0.5, 100),
        ),
        ("--steps 100 --optimizer DPAdam --set second_moment=bias_corrected",
         lambda: gaussian(1.0, 100)),
        # A run of banded noise is one release a round, of the noise that its bands leave.
        ("--steps 80 --sampling cyclic-poisson --groups 4 --set "
         """'noise={"class_name": "BandedMatrix", "config": {"steps": 80, "bands": 4}}'""",
         lambda: gaussian(1.0, 20, 0.04)),
    ],
)  # fmt: skip
def test_epsilon_is_that_of_dp_accounting(found, options, expected):
    result = found(f"epsilon {PLAN} --noise-multiplier 1 {options}")
    assert result["epsilon"] == pytest.approx(expected(), rel=1e-6)


def test_a_schedule_is_priced_step_by_step(found):
    result = found(f"epsilon {PLAN} --noise-multiplier 1 --steps 3 --set noise_schedule=[1,2,0.5]")
    accountant = dp_accounting.rdp.RdpAccountant()
    for alpha in (1, 2, 0.5):
        event = dp_accounting.GaussianDpEvent(alpha)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.01, event))
    assert result["epsilon"] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


def test_laplace_noise_at_delta_0(found):
    result = found(
        "epsilon --num-examples 1000 --batch-size 1000 --sampling full --steps 4 --delta 0 "
        "--noise-multiplier 8 --set noise=laplace"
    )
    assert result["epsilon"] == pytest.approx(4 / 8)


def test_a_learning_rate_schedule_of_keras(found):
    config = {"initial_learning_rate": 0.1, "decay_steps": 10, "decay_rate": 0.5}
    setting = f"learning_rate={json.dumps({'class_name': 'InverseTimeDecay', 'config': config})}"
    command = f"epsilon {PLAN} --noise-multiplier 1 --steps 30 --optimizer ADPSGD --set"
    result = found(command, setting)
    schedule = keras.optimizers.schedules.InverseTimeDecay(**config)
    optimizer = dp.optimizers.ADPSGD(
        schedule, 30, clip_norm=1.0, batch_size=500, noise_multiplier=1.0
    )
    sampling = dp.accounting.Sampling.poisson(50_000, 500)
    assert result["epsilon"] == dp.accounting.epsilon(optimizer, sampling, 30, DELTA, "rdp")


def test_the_accountant_is_auto_unless_it_is_named(found):
    command = "epsilon --num-examples 50000 --batch-size 500 --delta 1e-5"
    command += " --steps 1000 --noise-multiplier 1"
    each = {name: found(f"{command} --accountant {name}") for name in ("rdp", "pld", "auto")}
    assert found(command) == each["auto"]
    assert each["rdp"]["epsilon"] > each["auto"]["epsilon"] == each["pld"]["epsilon"] > 1.5


def test_no_noise_is_no_privacy_in_every_format(run, found):
    command = f"epsilon {PLAN} --steps 10 --noise-multiplier 0"
    assert found(command)["epsilon"] == "inf"
    assert "NO DIFFERENTIAL PRIVACY" in run(command)[1]


def test_the_samplings_are_those_of_the_library():
    from dp_keras_opt.accounting import sampling

    kinds = dict(sampling.KINDS)
    del kinds["staged_poisson"]  # a plan of the command line has one batch size
    assert set(arguments.SAMPLINGS) == set(kinds)
    for kind, made_as in kinds.items():
        assert set(made_as.adjacencies) <= set(arguments.ADJACENCIES)
        sizes = {
            "full": {},
            "cyclic_poisson": {"batch_size": 4, "groups": 2},
            "truncated_poisson": {"batch_size": 4, "max_batch_size": 6},
        }
        made = getattr(dp.accounting.Sampling, kind)(8, **sizes.get(kind, {"batch_size": 4}))
        options = f"epsilon --num-examples 8 --sampling {kind} --delta 0.01 --groups {made.groups}"
        if made.max_batch_size:
            options += f" --max-batch-size {made.max_batch_size}"
        parsed = make_parser().parse_args(options.split())
        assert runs.make_sampling(parsed, made.batch_size) == made


def test_calibrated_noise_is_the_least(found):
    result = found(f"calibrate {PLAN} --steps 1000 --epsilon 2")
    assert result["found"] == "noise_multiplier"
    sigma = result["noise_multiplier"]
    assert gaussian(sigma, 1000) == result["epsilon"] <= 2 < gaussian(sigma * (1 - 1e-4), 1000)


def test_the_noise_that_is_shown_meets_the_budget(run):
    out = run(f"calibrate {PLAN} --steps 1000 --epsilon 2")[1]
    assert gaussian(float(out.split()[3]), 1000) <= 2


def test_calibrated_steps_are_the_most(found):
    result = found(f"calibrate {PLAN} --noise-multiplier 1 --epsilon 2")
    assert gaussian(1.0, result["steps"]) <= 2 < gaussian(1.0, result["steps"] + 1)


def test_the_calibrated_batch_size_is_the_largest(found):
    command = "calibrate --num-examples 50000 --delta 1e-5 --epsilon 2 --noise-multiplier 1"
    command += " --accountant rdp"
    size = found(f"{command} --steps 1000")["batch_size"]
    assert gaussian(1.0, 1000, size / 50_000) <= 2 < gaussian(1.0, 1000, (size + 1) / 50_000)
    result = found(f"{command} --epochs 10")
    assert result["steps"] == 10 * -(-50_000 // result["batch_size"])
    assert 1.99 < gaussian(1.0, result["steps"], result["batch_size"] / 50_000) <= 2


def test_the_statement_of_a_plan_is_that_of_the_library(found):
    result = found(
        f"statement {PLAN} --steps 100 --noise-multiplier 1 --unit rating --group-size 2"
    )
    optimizer = dp.optimizers.DPSGD(clip_norm=1.0, batch_size=500, noise_multiplier=1.0)
    sampling = dp.accounting.Sampling.poisson(50_000, 500, unit="rating")
    assert result["statement"] == dp.accounting.statement(
        optimizer, sampling, 100, DELTA, "rdp", group_size=2
    )
    assert result["epsilon"] == pytest.approx(gaussian(1.0, 100), rel=1e-6)


# What is there.


def test_the_catalog_is_complete_and_true(found):
    listed = found("optimizers")["optimizers"]
    assert len(listed) == len(CATALOG)
    assert {e.name for e in CATALOG} == {c.__name__ for c in dp.optimizers.classes().values()}
    for entry in CATALOG:
        made = entry.make()
        assert type(made).__name__ == entry.name and entry.paper
        assert ("public data" in entry.needs) == made.needs_public
        assert bool(entry.arguments) == bool(set(entry.needs) - {"public data"})
    each = {entry["name"]: entry for entry in listed}
    two = {name for name, entry in each.items() if entry["releases_per_step"] == 2}
    assert two == {"SubspaceAdagrad"}  # v from noisy squares of its own
    # Adam: m and v. GaLore of rank 128 on 256 x 256: m and v of one half, a basis of one half.
    expected = {"DPSGD": 0, "DPAdam": 2, "DPAdagrad": 1, "DPGaLore": 1.5, "SubspaceAdagrad": 11}
    assert {name: each[name]["memory"] for name in expected} == expected


HELPERS = {"report", "quadratics"}  # of the experiments


def test_experiments_are_found_in_a_checkout(run, found, monkeypatch, tmp_path):
    names = {each["name"] for each in found("reproduce --list")["experiments"]}
    assert names == {p.stem for p in (ROOT / "examples/papers").glob("*.py")} - HELPERS
    monkeypatch.chdir(ROOT / "docs")
    assert set(reproduce.experiments()) == names
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dp, "__file__", str(tmp_path / "site-packages/dp_keras_opt/__init__.py"))
    code, _, err = run("reproduce adp")
    assert code == 3 and "clone" in err and "--examples DIR" in err
    assert set(reproduce.experiments(ROOT / "examples/papers")) == names


def test_an_experiment_runs_by_its_name(found, run, tmp_path):
    (tmp_path / "my_study.py").write_text(_STUDY)
    command = f"reproduce my-study --examples {tmp_path} --output {tmp_path}/out"
    result = found(f"{command} --quick --seed 5")
    assert result["files"] == [f"{tmp_path}/out/result.txt"]
    assert (tmp_path / "out/result.txt").read_text() == "--quick --seed 5"
    code, _, err = run(command)
    assert code == 1 and "exit code 7" in err
    code, _, err = run(f"reproduce other --examples {tmp_path}")
    assert code == 2 and "my_study" in err


_STUDY = '''"""A study."""
import pathlib, sys

if __name__ == "__main__":
    print("printed by the experiment")
    _, _, folder, *options = sys.argv
    pathlib.Path(folder).mkdir(exist_ok=True)
    pathlib.Path(folder, "result.txt").write_text(" ".join(options))
    sys.exit(0 if options else 7)
'''


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(found, shell):
    pytest.importorskip("shtab")
    script = found(f"completion {shell}")["script"]
    for word in ("calibrate", "noise-multiplier", "cyclic_poisson"):
        assert word in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert _completed_by_bash(script, "cal") == ["calibrate"]


def _completed_by_bash(script, word):
    ask = f"COMP_WORDS=(dp-keras-opt {word}); COMP_CWORD=1; _shtab_dp_keras_opt"
    code = f'{script}\n{ask} dp-keras-opt {word} dp-keras-opt\necho "${{COMPREPLY[@]}}"'
    return subprocess.run(
        ["bash", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()


def test_completion_names_its_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, _, err = run("completion bash")
    assert code == 1 and "dp-keras-opt[cli]" in err


# Indices of TFRecord files.


@pytest.fixture
def records(tmp_path):
    """Two TFRecord files, of three records and of one."""
    pytest.importorskip("google_crc32c")
    paths = [tmp_path / "a.tfrecord", tmp_path / "b.tfrecord"]
    for path, count in zip(paths, (3, 1), strict=True):
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in range(count):
                writer.write(bytes([record]) * 40)
    return paths


def test_an_index_is_built_and_checked(run, found, records):
    a, b = records
    assert found("index", a, b) == {
        "records": 4,
        "checked": False,
        "files": [
            {"file": str(path), "records": count, "index": f"{path}.index"}
            for path, count in ((a, 3), (b, 1))
        ],
    }
    assert [bytes(each)[0] for each in dp.data.TFRecords(records)[np.arange(4)]] == [0, 1, 2, 0]
    before = {path: path.read_bytes() for path in a.parent.iterdir()}
    code, out, _ = run("index --check", a, b, a)
    assert code == 0 and out == (
        f"{a}.index: 3 records, agrees\n{b}.index: 1 record, agrees\n4 records in 2 files\n"
    )
    assert before == {path: path.read_bytes() for path in a.parent.iterdir()}


def _of_other_records(path):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in range(3):
            writer.write(bytes([record + 1]) * 40)  # of the same length


def _damaged(path):
    path.write_bytes(path.read_bytes()[:20] + b"!" + path.read_bytes()[21:])


def _compressed(path):
    path.write_bytes(gzip.compress(path.read_bytes()))


@pytest.mark.parametrize(
    ("option", "change", "message"),
    [
        ("", pathlib.Path.unlink, "There is no file"),
        ("", _damaged, "the record at byte 0 of "),
        ("", _compressed, "It is compressed"),
        ("", lambda path: path.write_bytes(b"text" * 9), "is no TFRecord file from byte 0 on"),
        ("", lambda path: os.truncate(path, 60), "ends within"),
        ("--check", _damaged, "the record at byte 0 of "),
        ("--check", _of_other_records, "is not the index of "),
        ("--check", lambda path: os.remove(f"{path}.index"), "has no index"),
    ],
)
def test_files_without_a_true_index(run, records, option, change, message):
    a, b = records
    dp.data.index_tfrecord(records)
    change(a)
    before = {path: path.read_bytes() for path in a.parent.iterdir()}
    code, out, err = run(f"index {option}", a, b)
    assert (code, out) == (3, "") and message in err
    assert before == {path: path.read_bytes() for path in a.parent.iterdir()}


def test_index_names_its_extra(run, records, monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    code, _, err = run("index", records[0])
    assert code == 1 and "google-crc32c" in err and "dp-keras-opt[data]" in err


# Models and data.


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with models and the same data in each format."""
    folder = tmp_path_factory.mktemp("files")
    layers, rng = keras.layers, np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype("float32")
    y = (x @ np.float32([[1.0], [-2.0], [0.5]])).astype("float32")
    np.savez(folder / "data.npz", x=x, y=y)
    with open(folder / "data.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "price", "c"])
        writer.writerows(zip(x[:, 0], x[:, 1], y[:, 0], x[:, 2], strict=True))
    text = (folder / "data.csv").read_text().replace("a,b,", "b,a,", 1)
    (folder / "other.csv").write_text(text)
    _write_tfrecord(folder / "data.tfrecord", {"x": x, "price": y})
    np.savez(folder / "named.npz", x_left=x[:, :1], x_right=x[:, 1:], y=y)
    keras.Sequential([keras.Input((3,)), layers.Dense(1)]).save(folder / "plain.keras")
    keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Dense(1)]).save(
        folder / "mixing.keras"
    )
    left, right = keras.Input((1,), name="left"), keras.Input((2,), name="right")
    output = layers.Dense(1)(layers.Concatenate()([left, right]))
    keras.Model({"left": left, "right": right}, output).save(folder / "two.keras")
    return folder


def _write_tfrecord(path, arrays):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in zip(*arrays.values(), strict=True):
            feature = {
                name: tf.train.Feature(float_list=tf.train.FloatList(value=values.ravel()))
                for name, values in zip(arrays, row, strict=True)
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())


def test_every_format_gives_the_same_arrays(files):
    x, y = datasets.load(files / "data.npz")
    assert x.shape == (400, 3) and y.shape == (400, 1)
    described = {
        "x": {"shape": [3], "dtype": "float32"},
        "price": {"shape": [1], "dtype": "float32"},
    }
    (files / "schema.json").write_text(json.dumps(described))
    for other in (
        datasets.load(files / "data.csv", target="price"),
        datasets.load(files / "data.tfrecord", "price", ["x:3:float32", "price:1:float32"]),
        datasets.load(files / "data.tfrecord", "price", schema=files / "schema.json"),
    ):
        np.testing.assert_allclose(other[0], x, rtol=1e-6)
        np.testing.assert_allclose(other[1], y, rtol=1e-6)
    named, _ = datasets.load(files / "named.npz")
    assert {name: a.shape for name, a in named.items()} == {"left": (400, 1), "right": (400, 2)}


@pytest.mark.parametrize(
    ("model", "data", "options"),
    [
        ("plain", "data.npz", "--optimizer dpadam --set learning_rate=0.05 --metric mae"),
        ("plain", "data.csv", "--target price --optimizer DPSGD --set momentum=0.9"),
        (
            "plain",
            "data.tfrecord",
            "--feature x:3:float32 --feature price:1:float32 --target price --optimizer DPAdagrad",
        ),
        ("two", "named.npz", "--optimizer PDADPMD --public {}/named.npz"),
    ],
)
def test_trains_from_files_to_a_served_model(found, files, tmp_path, model, data, options):
    output = tmp_path / "out"
    result = found(
        f"train {files}/{model}.keras {files}/{data} {TRAINING} --validation {files}/{data} "
        f"--output {output} --export {tmp_path}/served/1 {options.format(files)}"
    )
    steps = 2 * 20
    assert result["steps"] == steps
    assert 2.99 < result["epsilon"] <= 3
    assert gaussian(result["noise_multiplier"], steps, 20 / 400) == pytest.approx(
        result["epsilon"], rel=1e-6
    )
    text = (output / "statement.txt").read_text()
    assert text == result["statement"] and f"{steps} steps, Gaussian noise" in text
    with open(output / "history.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert float(rows[-1]["epsilon"]) == result["epsilon"]

    again = keras.saving.load_model(output / "model.keras")
    assert again.ledger.epsilon(DELTA, "rdp") == result["epsilon"]
    arguments_of = [f for f in options.split() if ":" in f]
    x, y = datasets.load(files / data, "price" if "price" in options else None, arguments_of)
    predicted = again.predict(x, verbose=0)
    assert result["validation"]["loss"] == pytest.approx(np.mean((predicted - y) ** 2), rel=1e-4)
    served = tf.saved_model.load(str(tmp_path / "served/1"))
    np.testing.assert_allclose(served.serve(x), predicted, rtol=1e-4, atol=1e-5)


def test_a_ledger_and_a_model_carry_the_budget_on(run, found, files, tmp_path):
    ledger, first, second = tmp_path / "spent.jsonl", tmp_path / "1", tmp_path / "2"
    command = (
        f"{files}/data.npz --loss mse --delta 1e-5 --epochs 2 --batch-size 20 --accountant rdp"
    )
    found(f"train {files}/plain.keras {command} --epsilon 2 --output {first} --ledger {ledger}")
    spent = found(f"ledger {ledger} --delta 1e-5 --accountant rdp")
    assert spent["steps"] == 40 and [s["steps"] for s in spent["segments"]] == [40]
    sigma = spent["segments"][0]["releases"][0]["multiplier"]
    assert spent["epsilon"] == pytest.approx(gaussian(sigma, 40, 0.05), rel=1e-6)
    stated = found(f"statement {first}/model.keras --delta 1e-5 --accountant rdp")
    assert stated["statement"] == spent["statement"]
    assert run(f"ledger {ledger} --delta 1e-5")[1].startswith("steps")

    again = f"train {first}/model.keras {command} --output {second}"
    code, _, err = run(f"{again} --epsilon 2")
    assert code == 4 and "spent already" in err and not second.exists()
    code, _, err = run(
        f"train {files}/plain.keras {command} --epsilon 2 --output {second} --ledger {ledger}"
    )
    assert code == 4

    result = found(f"{again} --epsilon 3")
    accountant = dp_accounting.rdp.RdpAccountant()
    for multiplier in (sigma, result["noise_multiplier"]):
        event = dp_accounting.GaussianDpEvent(multiplier)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.05, event), 40)
    assert accountant.get_epsilon(DELTA) == pytest.approx(result["epsilon"], rel=1e-6)
    assert 2.99 < result["epsilon"] <= 3 and result["steps"] == 80


def test_a_privacy_filter_speaks_of_its_budget(run, found, files, tmp_path):
    path, renyi = tmp_path / "spent.jsonl", dp.accounting.RenyiFilter(8)
    budget = dp.accounting.Budget(4.0, DELTA, renyi)
    ledger = dp.accounting.Ledger(path)
    sgd = dp.optimizers.DPSGD(0.1, clip_norm=1.0, noise_multiplier=2.0, batch_size=50)
    sampling = dp.accounting.Sampling.poisson(1000, 50)
    ledger.begin(sgd.releases, sampling, filter=budget.filter)
    ledger.reserve(30)
    ledger.unlock()
    result = found(f"ledger {path} --delta 1e-5")
    assert result["epsilon_as_planned"] == 4.0 > result["epsilon"] == ledger.epsilon(DELTA, renyi)
    assert result["segments"][0]["privacy_filter"] == budget.filter.get_config()
    assert "whatever was chosen" in " ".join(result["statement"].split())
    assert found(f"risk {path}")["basis"] == "budget of a filter"
    code, _, err = run(f"statement {path} --delta 1e-5 --accountant pld")
    assert code == 1 and "does not bound steps that ran under a privacy filter" in err


def test_explain(run, found, files):
    layers = found(f"explain {files}/plain.keras")["layers"]
    assert [layer["weights"] for layer in layers] == [4]
    assert {layer["engine"] for layer in layers} == {"rule"}
    code, out, err = run(f"explain {files}/mixing.keras")
    assert code == 1 and "BatchNormalization" in out and "GroupNormalization" in err
    code, out, _ = run(f"explain {files}/mixing.keras --json")
    assert code == 1 and len(json.loads(out)["refused"]) == 1


def test_fix_trains_what_is_refused(run, found, files, tmp_path):
    command = f"train {files}/mixing.keras {files}/data.npz {TRAINING} --output {tmp_path}/out"
    code, _, err = run(command)
    assert code == 1 and "GroupNormalization" in err and not (tmp_path / "out").exists()
    assert found(f"{command} --fix")["epsilon"] <= 3


def test_layers_of_ones_own_are_imported(run, found, tmp_path, monkeypatch):
    (tmp_path / "own_layers.py").write_text(_OWN_LAYERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_layers").Twice
    keras.Sequential([keras.Input((3,)), own(), keras.layers.Dense(1)]).save("own.keras")
    del sys.modules["own_layers"], keras.saving.get_custom_objects()["own>Twice"]
    sys.path.remove(str(tmp_path))
    code, _, err = run("explain own.keras")
    assert code == 3 and "--import MODULE" in err
    code, _, err = run("explain own.keras --import no_such_module")
    assert code == 2 and "no_such_module" in err
    assert found("explain own.keras --import own_layers")["layers"]


_OWN_LAYERS = """
import keras

@keras.saving.register_keras_serializable(package="own")
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x
"""


# Comparisons.


COMPARE = "compare {0}/plain.keras {0}/data.npz --loss mse --delta 1e-5 --batch-size 32 --steps 8"


def test_compare_writes_resumes_and_warns(found, run, files, tmp_path):
    names = ["DPSGD", "DPAdam, banded noise"]
    options = ["--trials", 1, "--seeds", 2, "--epsilon", 2, "--output", tmp_path]
    command = COMPARE.format(files)
    result = found(command, *options, "--optimizers", *names)
    assert {row["candidate"] for row in result["rows"]} == set(names)
    with open(tmp_path / "results.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 4
    assert (tmp_path / "scores.png").stat().st_size > 1000
    assert "Each model alone is private" in result["note"]
    before = (tmp_path / "results.csv").read_bytes()
    code, out, _ = run(command, *options, "--optimizers", *names)
    assert code == 0 and (tmp_path / "results.csv").read_bytes() == before
    assert (tmp_path / "table.md").read_text() in out


def test_held_out_parts_are_disjoint(files):
    x, y = datasets.load(files / "data.npz")
    parts = datasets.split((x, y), [0.1, 0.25])
    sizes = np.array([len(part[1]) for part in parts])
    assert np.all(np.abs(sizes - [260, 40, 100]) < 40)  # 4 standard errors
    rows = np.concatenate([np.concatenate(part, axis=1) for part in parts])
    expected = np.concatenate([x, y], axis=1)
    np.testing.assert_array_equal(np.unique(rows, axis=0), np.unique(expected, axis=0))
    named, _ = datasets.load(files / "named.npz")
    left, held, none = datasets.split((named, y), [0.5, 0])
    assert none is None and held[0]["right"].shape == (len(held[1]), 2)
    assert abs(len(left[1]) - 200) < 40
    with pytest.raises(results.FileError, match="too few to hold"):
        datasets.split((x[:5], y[:5]), [0.1, 0.1])


@pytest.mark.parametrize("kind", ["numbers", "texts", "named"])
def test_no_other_example_changes_its_part(kind):
    """With one row fewer, 41 of 1,000 changed theirs: ε was not that of the file."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, (300, 4)), rng.normal(size=(300, 1)).astype("float32")
    if kind == "texts":
        x = np.array([" ".join("word" * n for n in row) for row in x])
    x = {"a": x, "b": x[:, 0]} if kind == "named" else x

    def but(place):
        def without(array):
            return np.delete(array, place, axis=0).astype(array.dtype if kind == "texts" else float)

        return keras.tree.map_structure(without, (x, y))

    def found(data):
        return [set(part[1].ravel().tolist()) for part in datasets.split(data, [0.2, 0.2])]

    whole = found((x, y))
    for place in (0, 120, 299):
        gone = float(y[place, 0])
        assert found(but(place)) == [part - {gone} for part in whole]


def test_a_table_of_few_kinds_of_rows_is_split():
    """One hash held all equal rows together: of 100 tables of two columns 64 were refused."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (400, 2))
    y = np.zeros(400)

    def counts(data):
        return [np.bincount(2 * p[0][:, 0] + p[0][:, 1]) for p in datasets.split(data, [0.1, 0.1])]

    whole = counts((x, y))
    assert abs(whole[1].sum() - 40) < 24 and abs(whole[2].sum() - 40) < 24  # 4 standard errors
    for place in (0, 120, 399):
        fewer = counts((np.delete(x, place, axis=0), y[1:]))
        lost = [before - after for before, after in zip(whole, fewer, strict=True)]
        assert sum(each.sum() for each in lost) == 1
        assert min(each.min() for each in lost) == 0


def test_texts_are_held_out_whatever_the_longest_is():
    texts, y = np.array(["a", "bb", "ccc"] * 40), np.arange(120.0)
    longer = np.append(texts, "d" * 99)
    assert longer.dtype != texts.dtype
    one, other = (datasets.split(d, [0.5]) for d in ((texts, y), (longer, np.append(y, 120.0))))
    for before, after in zip(one, other, strict=True):
        assert set(after[1]) - {120.0} == set(before[1])


def test_compare_lists_the_candidates(found):
    assert found("compare --list")["optimizers"] == list(dp.tuning.CANDIDATES)


# Errors.

RUN = f"{PLAN} --steps 10 --noise-multiplier 1"
TRAIN = "train {0}/plain.keras {0}/data.npz"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("", 2, "required: COMMAND"),
        ("epsilon", 2, "--num-examples"),
        (f"epsilon {PLAN} --noise-multiplier 1", 2, "give --steps or --epochs"),
        (f"epsilon {PLAN} --steps 10", 2, "Give --noise-multiplier"),
        (f"epsilon {RUN} --epochs 1", 2, "not allowed with argument --steps"),
        (f"epsilon {RUN} --batch-size 0", 2, "'0' is not a whole number from 1"),
        (f"epsilon {RUN} --delta 1", 2, "'1' is not a number from 0 to below 1"),
        (f"epsilon {RUN} --delta x", 2, "'x' is not a number"),
        (f"epsilon {RUN} --noise-multiplier -1", 2, "'-1' is not a number from 0"),
        (f"epsilon {RUN} --batch-size 50001", 2, "batch_size must be at most"),
        (f"epsilon {RUN} --sampling shuffled --adjacency add_or_remove_one", 2, "shifts all"),
        (f"epsilon {RUN} --sampling lottery", 2, "invalid choice: 'lottery'"),
        (f"epsilon {RUN} --groups 3", 2, "Only cyclic Poisson sampling has groups"),
        (f"epsilon {RUN} --optimizer SGD", 2, "use one of DPSGD"),
        (f"epsilon {RUN} --optimizer DP2Yogi", 2, "--set adaptive_clip_norm=VALUE"),
        (f"epsilon {RUN} --set momentum", 2, "is not KEY=VALUE"),
        (f"epsilon {RUN} --set noise=[1", 2, "the value is not JSON"),
        (f"epsilon {RUN} --set seed=1", 2, "can subtract the noise"),
        (f"epsilon {RUN} --set batch_size=1", 2, "give --batch-size"),
        (f"epsilon {RUN} --set blub=1", 2, "blub"),
        (f"epsilon {RUN} --optimizer DPAdam --set second_moment=joint", 2, "Joint"),
        (f"epsilon {RUN} --sampling without_replacement --accountant pld", 1, "cannot price"),
        (f"epsilon {RUN} --set noise_schedule=[1,1]", 1, "end of the noise schedule"),
        (f"calibrate {RUN} --epsilon 1", 2, "Leave out exactly one"),
        (f"calibrate {PLAN} --epsilon 1", 2, "Left out here: noise multiplier, steps"),
        (f"calibrate {PLAN} --steps 10 --epsilon 0", 2, "'0' is not a positive number"),
        (f"calibrate {PLAN} --steps 10 --epsilon 1e9", 1, "hardly any noise"),
        (f"calibrate {PLAN} --noise-multiplier 0.1 --epsilon 1", 1, "one step exceeds it"),
        (
            "calibrate --num-examples 9 --noise-multiplier 0.1 --steps 9 --epsilon 1 --delta 0.01",
            1,
            "batches of one exceed",
        ),
        ("statement --delta 1e-5", 2, "Give FILE, or a planned run"),
        (f"statement {{0}}/plain.keras {RUN}", 2, "and not both"),
        ("statement {0}/plain.keras --steps 3 --delta 1e-5", 2, "and not both"),
        ("statement {0}/plain.keras --delta 1e-5", 3, "not private"),
        ("statement {0}/none.keras --delta 1e-5", 3, "There is no file"),
        ("ledger {0}/none.jsonl --delta 1e-5", 3, "There is no file"),
        ("ledger {0}/data.csv --delta 1e-5", 3, "no record of a ledger"),
        ("ledger {0} --delta 1e-5", 3, "Is a directory"),
        ("explain {0}/data.csv", 3, "is no .keras file"),
        ("explain {0}/data.npz", 3, "Keras cannot load"),
        ("index", 2, "required: FILE"),
        ("index {0}", 3, "Is a directory"),
        ("reproduce", 2, "Give the NAME"),
        ("completion tcsh", 2, "invalid choice"),
        ("train {0}/none.keras {0}/data.npz " + TRAINING, 3, "There is no file"),
        ("train {0}/plain.keras {0}/none.npz " + TRAINING, 3, "There is no file"),
        (f"{TRAIN} {TRAINING} --loss nonsense", 2, "--loss: "),
        (f"{TRAIN} {TRAINING} --metric nonsense", 2, "--metric: "),
        (f"{TRAIN} {TRAINING} --batch-size 401", 2, "batch_size"),
        (f"{TRAIN} {TRAINING} --epsilon 1e9", 1, "hardly any noise"),
        (f"{TRAIN} {TRAINING} --optimizer AdaDPS", 2, "--public FILE"),
        (f"{TRAIN} {TRAINING} --public {{0}}/named.npz", 3, "has x_left (1,), x_right (2,)"),
        (
            "train {0}/plain.keras {0}/data.csv --target price --validation {0}/other.csv "
            + TRAINING, 3, "other.csv has columns b, a, price, c, but",
        ),
        ("compare", 2, "Give MODEL and DATA, or --list"),
        (COMPARE.replace("--delta 1e-5", ""), 2, "Give --delta"),
        (f"{COMPARE} --optimizers Adam", 2, "--optimizers: There is no candidate 'Adam'"),
        (f"{COMPARE} --optimizers AdaDPS", 1, "AdaDPS needs public data"),
        (f"{COMPARE} --metric nonsense", 2, "--metric: "),
        (f"{COMPARE} --test {{0}}/named.npz", 3, "has x_left (1,), x_right (2,)"),
        (COMPARE.replace("plain", "mixing"), 1, "BatchNormalization"),
        (f"{TRAIN} {TRAINING} --ledger {{0}}/data.csv", 3, "no record of a ledger"),
        (f"{TRAIN} {TRAINING} --export {{0}} --output {{0}}/old", 3, "old/model.keras exists"),
        (f"{TRAIN} {TRAINING} --export {{0}}", 3, "holds other files than those of an export"),
    ],
)  # fmt: skip
def test_errors_are_one_line_with_the_fix(run, files, tmp_path, command, code, message):
    (files / "old").mkdir(exist_ok=True)
    (files / "old" / "model.keras").touch()
    given = command.format(files)
    if given.startswith(("train", "compare ")) and "--output" not in given:
        given += f" --output {tmp_path / 'out'}"
    actual, out, err = run(given)
    assert (actual, out) == (code, ""), err
    assert message in err.splitlines()[-1] and "dp-keras-opt: error: " in err
    assert not list(tmp_path.glob("out/*"))


def _npz(**arrays):
    return lambda path: np.savez(path, **arrays)


def _text(text):
    return lambda path: path.write_text(text)


ONES = np.ones((3, 2), "float32")
FEATURES = {"features": ["x:2:float32", "y::float32"]}


@pytest.mark.parametrize(
    ("name", "write", "options", "message"),
    [
        ("a.npz", _text("no zip"), {}, "cannot be read as .npz"),
        ("a.npz", _npz(x=np.array([None])), {}, "cannot be read as .npz"),
        ("a.npz", _npz(x=ONES), {}, "has x. Needed are x and y"),
        ("a.npz", _npz(x=ONES, x_a=ONES, y=ONES), {}, "Needed are x and y"),
        ("a.npz", _npz(x=ONES, y=ONES[:2]), {}, "lengths are [2, 3]"),
        ("a.npz", _npz(x=ONES[:0], y=ONES[:0]), {}, "lengths are [0]"),
        ("a.npz", _npz(x=ONES, y=np.float32(1)), {}, "lengths are [0, 3]"),
        ("a.npz", _npz(x=ONES, y=ONES), {"target": "z"}, "has no 'z'; it has x, y"),
        ("a.npz", _npz(y=ONES), {"target": "y"}, "nothing to predict it from"),
        ("a.csv", _text("a,b\n1,2\n"), {}, "--target NAME"),
        ("a.csv", _text("a,b\n1,2\n"), {"target": "c"}, "its header is a, b"),
        ("a.csv", _text("a,b,c\n1,x,z\n"), {"target": "a"}, "'b' is not numeric: 'x' in row 1"),
        ("a.csv", _text("a,b\n1,2\n3,\n"), {"target": "a"}, "'b' is empty in row 2"),
        ("a.csv", _text("a,b\n1,2,3\n"), {"target": "a"}, "row 1 has 3 fields"),
        ("a.csv", _text("a,a\n1,2\n"), {"target": "a"}, "different names"),
        ("a.csv", _text("a,b\n"), {"target": "a"}, "it has 0 rows"),
        ("a.csv", lambda path: path.write_bytes(b"a,\xff\n"), {"target": "a"}, "no CSV text"),
        ("a.tfrecord", _text("text"), {}, "--feature NAME:SHAPE:TYPE"),
        ("a.tfrecord", _text("text" * 9), FEATURES, "no TFRecord file"),
        ("a.tfrecord", _text(""), FEATURES, "has no examples"),
        ("a.tfrecord", lambda path: _write_tfrecord(path, {"x": ONES}), FEATURES, "other features"),
        ("a.tfrecord", _text(""), {"features": ["x:2"]}, "is not NAME:SHAPE:TYPE"),
        ("a.tfrecord", _text(""), {"features": ["x:2:float64"]}, "must be one of float32"),
        ("a.tfrecord", _text(""), {"schema": "none.json"}, "none.json cannot be read"),
        ("a.parquet", _text(""), {}, "none of .npz, .csv and .tfrecord"),
    ],
)  # fmt: skip
def test_data_errors_say_what_is_wrong(tmp_path, name, write, options, message):
    write(tmp_path / name)
    with pytest.raises((datasets.FileError, datasets.UsageError), match=re.escape(message)):
        datasets.load(tmp_path / name, **options)


def test_a_ledger_in_use_is_refused(run, files, tmp_path):
    ledger = dp.accounting.Ledger(tmp_path / "spent.jsonl")
    code, _, err = run(
        f"train {files}/plain.keras {files}/data.npz {TRAINING} --ledger {ledger.path}"
    )
    assert code == 3 and "is in use" in err


def test_warnings_are_lines_of_their_own(run):
    code, _, err = run(f"epsilon {RUN} --delta 0.1")
    assert code == 0 and err.startswith("dp-keras-opt: warning: delta=0.1 is not below")


def test_debug_shows_where(capsys):
    assert main(shlex.split(f"epsilon {RUN} --optimizer SGD --debug")) == 2
    assert "Traceback" in capsys.readouterr().err


# The page of the documentation.

PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")


def examples():
    """(command, expected output) of the page's blocks, in which `...` stands for anything."""
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, re.M | re.S):
        for example in re.findall(r"^\$ dp-keras-opt (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
            yield pytest.param(*example, id=example[0][:40])


@pytest.mark.skipif(
    importlib.metadata.version("dp-accounting").startswith("0.4"),
    reason="its epsilon differs from the page's in the third digit",
)
@pytest.mark.parametrize(("command", "expected"), examples())
def test_the_documentation_shows_what_is_printed(run, command, expected):
    _, out, err = run(command)
    pattern = ".*".join(re.escape(part) for part in expected.split("..."))
    assert re.fullmatch(pattern, out + err + "\n" * bool(err), re.S), out + err


def test_the_documentation_names_all_commands_and_exit_codes():
    (commands,) = (a for a in make_parser()._actions if a.dest == "command")
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == set(commands.choices)
    kinds = [0, *(kind.code for kind in results.CommandError.__subclasses__())]
    codes = {*kinds, results.CommandError.code, results.INTERRUPTED}
    assert set(map(int, re.findall(r"^\| (\d+) \|", PAGE, re.M))) == codes


# As a process.


def process(*command, **options):
    program = [sys.executable, "-m", "dp_keras_opt_cli", *map(str, command)]
    return subprocess.Popen(
        program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_help_does_not_wait_for_tensorflow():
    command = [sys.executable, "-X", "importtime", "-m", "dp_keras_opt_cli", "train", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "--ledger" in done.stdout
    slow = {"tensorflow", "keras", "numpy", "dp_accounting", "dp_keras_opt"}
    assert "dp_keras_opt_cli.parser" in imported and not slow & imported


def test_the_version_is_that_of_the_distribution(run):
    code, out, _ = run("--version")
    assert code == 0 and out == f"dp-keras-opt {importlib.metadata.version('dp-keras-opt')}\n"


def test_every_command_names_a_function():
    (commands,) = (a for a in make_parser()._actions if a.dest == "command")
    for parser in commands.choices.values():
        function = pkgutil.resolve_name(f"dp_keras_opt_cli.{parser.get_default('run')}")
        assert inspect.isfunction(function) and function.__doc__


_SAY_NAMES = "import sys; sys.argv = {argv!r}; import dp_keras_opt as dp; print(*dp.__all__)"


@pytest.mark.representatives(1)
@pytest.mark.parametrize("argv", [["dp-keras-opt", "--help"], ["/bin/dp-keras-opt"], ["-m"], []])
def test_the_library_is_the_same_whatever_the_program_is_called(argv):
    command = [sys.executable, "-c", _SAY_NAMES.format(argv=argv)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == dp.__all__ and "DPModel" in dp.__all__


def test_the_old_names_of_the_command_line_work():
    cli = importlib.import_module("dp_keras_opt.cli")
    assert cli.main is main
    command = [sys.executable, "-m", "dp_keras_opt", "optimizers", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["optimizers"]) == len(CATALOG)


def test_a_process_prints_json_and_nothing_else():
    # A level that is set is the user's wish, and TensorFlow may then greet.
    quiet = {k: v for k, v in os.environ.items() if not k.startswith("TF_CPP")}
    out, err = process("epsilon", *shlex.split(RUN), "--json", env=quiet).communicate(timeout=120)
    assert json.loads(out)["epsilon"] == pytest.approx(gaussian(1.0, 10), rel=1e-6)
    assert err == ""


def test_an_interrupt_ends_a_process_with_130(files, tmp_path):
    command = shlex.split(f"train {files}/plain.keras {files}/data.npz {TRAINING} --epochs 100000")
    child = process(
        *command, "--output", tmp_path, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        # A shell lets what it starts in the background ignore interrupts, and so their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while not child.stdout.readline().startswith("Epoch 2"):
        assert child.poll() is None
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130 and err.splitlines()[-1] == "dp-keras-opt: error: interrupted"
    assert keras.saving.load_model(tmp_path / "model.keras").ledger.steps > 20
