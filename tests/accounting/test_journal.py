"""The ledger in a file: what it says after every way to lose a process, a disk or a line."""

import copy
import json
import os
import pickle
import subprocess
import sys
import warnings

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_keras_opt as dp
from dp_keras_opt.accounting import Ledger, Sampling, journal

DELTA = 1e-5
POISSON = Sampling.poisson(1000, 10)
SHUFFLED = Sampling.shuffled(1000, 100)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "spent.jsonl"


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(ledger, releases, steps, sampling=POISSON, one_by_one=True, **kwargs):
    ledger.begin(releases, sampling, **kwargs)
    for count in [1] * steps if one_by_one else [steps]:
        ledger.reserve(count)
        ledger.settle(count, count)


def test_it_survives_the_process(path, gaussians):
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 30)
    run(ledger, gaussians(2.0), 20, Sampling.poisson(1000, 20), clip_norm=0.5)
    spent, segments = ledger.epsilon(DELTA), ledger.segments
    ledger.unlock()
    again = Ledger(path)
    assert again.segments == segments and again.epsilon(DELTA) == spent
    assert again.current is None and again.path == path
    run(again, gaussians(1.0), 5)
    assert again.steps == 55 and Ledger.read(path).steps == 55


def test_it_is_readable(path, gaussians):
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 2)
    ledger.sync()
    first, *rest = lines(path)
    assert first["begins"]["sampling"]["kind"] == "poisson"
    assert first["begins"]["releases"][0]["multiplier"] == 1.0
    assert first["reserved"] == 1
    assert [record["reserved"] for record in rest if "reserved" in record] == [2]
    assert {record["run"] for record in rest} == {first["run"]} and "time" in first


def test_steps_are_on_disk_before_they_run(path, gaussians):
    ledger = Ledger(path)
    ledger.begin(gaussians(1.0), POISSON)
    for count in (1, 5, 500, 1, 3):
        ledger.reserve(count)
        assert Ledger.read(path).steps >= ledger.steps
        assert Ledger.read(path).steps <= 1.01 * ledger.steps
    ledger.settle(510, 400)
    assert Ledger.read(path).steps >= 510  # given back only when it is written
    ledger.sync()
    assert Ledger.read(path).steps == ledger.steps == 400


def test_few_steps_wait_for_the_disk(path, gaussians):
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 20_000)
    assert len(lines(path)) < 800


def test_steps_ahead_end_with_the_schedule(path, gaussians):
    ledger = Ledger(path)
    ledger.begin(gaussians(1.0), POISSON, [1.0] * 500)
    ledger.reserve(499)
    assert Ledger.read(path).steps == 500
    ledger.reserve(1)
    assert Ledger.read(path).epsilon(DELTA) == ledger.epsilon(DELTA)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("begin"), st.floats(0.5, 4)),
            st.tuples(st.just("reserve"), st.integers(0, 300)),
            st.tuples(st.just("settle"), st.integers(0, 300)),
            st.tuples(st.just("sync"), st.none()),
            st.tuples(st.just("reopen"), st.none()),
        ),
        max_size=25,
    ),
    st.integers(0, 10**6),
)
def test_a_file_cut_at_any_byte_counts_what_ran(tmp_path_factory, actions, cut):
    """Whatever was done when the process died at a write, half written: all steps that ran count.

    What counts as run are the steps reserved, once `reserve` came back, and not given back.
    """
    from dp_keras_opt.noise import Gaussian, Release

    path = tmp_path_factory.mktemp("ledger") / "spent.jsonl"
    ledger = Ledger(path)
    states = [(0, 0)]  # (size of the file, steps that may have run by then)
    for action, value in actions:
        if action == "begin":
            ledger.begin((Release(0, "mean", value, Gaussian()),), POISSON)
        elif action == "sync":
            ledger.sync()
        elif action == "reopen":
            ledger.unlock()
            ledger = Ledger(path)
        elif ledger.current is not None:
            if action == "reserve":
                ledger.reserve(value)
            else:
                reserved = ledger._pending
                ledger.settle(reserved, min(value, reserved))
        states.append((path.stat().st_size, ledger.steps))
    ledger.unlock()
    content = path.read_bytes()
    cut %= len(content) + 1
    # Written by then: all that had run at the last moment when the file was no longer than this.
    ran = [steps for size, steps in states if size <= cut][-1]
    path.write_bytes(content[:cut])
    assert Ledger.read(path).steps >= ran
    ledger = Ledger(path)
    run(ledger, (Release(0, "mean", 1.0, Gaussian()),), 3)
    ledger.unlock()
    assert Ledger.read(path).steps >= ran + 3


def test_a_torn_last_line_is_cut_off(path, gaussians):
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 10)
    ledger.unlock()
    whole = path.read_bytes()
    for torn in (b'{"run": "ab', b'{"r', b'{"run": "ab", "reserved": 7}', b"\0\0\0"):
        path.write_bytes(whole + torn)
        assert Ledger.read(path).steps == 10
        assert path.read_bytes() == whole + torn  # reading changes nothing
        ledger = Ledger(path)
        assert ledger.steps == 10 and path.read_bytes() == whole
        ledger.unlock()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("{", "", 1),
        lambda text: text.replace('"reserved"', '"reserves"', 1).replace('"begins"', '"begun"', 1),
        lambda text: "\n".join(text.split("\n")[1:]),
        lambda text: text + "not a record\n",
        lambda text: "a file of mine, in which\nno ledger is",
        lambda text: "no line at all",
    ],
)
def test_other_files_are_left_alone(path, gaussians, damage):
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 3)
    ledger.unlock()
    text = damage(path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    for opened in (Ledger, Ledger.read):
        with pytest.raises(ValueError, match="no record of a ledger|is no ledger"):
            opened(path)
    assert path.read_text(encoding="utf-8") == text


def test_two_writers_are_refused(path, gaussians):
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 3)
    with pytest.raises(RuntimeError, match="is in use"):
        Ledger(path)
    script = "import sys; from dp_keras_opt.accounting import Ledger; Ledger(sys.argv[1])"
    other = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert "is in use" in other.stderr and other.returncode
    assert Ledger.read(path).steps == 3  # reading is allowed
    ledger.unlock()
    assert Ledger(path).steps == 3


def test_a_fork_does_not_write(path, gaussians):
    ledger = Ledger(path)
    ledger.begin(gaussians(1.0), POISSON)
    ledger.reserve(1)
    child = os.fork()
    if not child:
        try:
            ledger.reserve(5)
        except RuntimeError as error:
            os._exit(7 if "forked from" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ledger.reserve(1)
    assert Ledger.read(path).steps == 2


def test_a_full_disk_stops_before_the_step(path, gaussians, monkeypatch):
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 3)
    before, write = path.read_bytes(), os.write
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[: len(line) // 2]))
    with pytest.raises(OSError, match="No space left"):
        ledger.reserve(5)
    assert ledger.steps == 3 and path.read_bytes() == before
    monkeypatch.undo()
    ledger.reserve(5)  # there is space again
    assert Ledger.read(path).steps == 8


def test_a_disk_that_fails_is_not_written_to_again(path, gaussians, monkeypatch):
    ledger = Ledger(path)
    ledger.begin(gaussians(1.0), POISSON)

    def fails(file):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        ledger.reserve(5)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="failed before"):
        ledger.reserve(5)
    assert ledger.steps == 0


def test_a_file_that_was_deleted_stops_the_training(path, gaussians):
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 3)
    path.unlink()
    with pytest.raises(RuntimeError, match="was deleted"):
        ledger.reserve(1)


def test_a_relative_path_is_that_of_the_folder_it_was_given_in(tmp_path, gaussians, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger("spent.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ledger.begin(gaussians(1.0), POISSON)
    ledger.reserve(3)
    assert Ledger.read(tmp_path / "spent.jsonl").steps >= 3
    ledger.unlock()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        Ledger(tmp_path / "spent.jsonl")
    tmp_path.chmod(0o700)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        Ledger(tmp_path / "no" / "spent.jsonl")


def test_clocks_may_jump(path, gaussians, monkeypatch):
    class Clock(journal.datetime.datetime):
        hours = iter([12, 3, 23, 0, 5])

        @classmethod
        def now(cls, zone):
            return cls(2000, 1, 1, next(cls.hours), tzinfo=zone)

    monkeypatch.setattr(journal.datetime, "datetime", Clock)
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 5)
    assert Ledger.read(path).steps == 5


def test_copies_have_no_file(path, gaussians):
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 3)
    sent = pickle.loads(pickle.dumps(copy.copy(ledger)))
    for other in (copy.copy(ledger), copy.deepcopy([ledger])[0], sent):
        assert other.steps == 3 and other.path is None
        run(other, gaussians(1.0), 4)
    assert Ledger.read(path).steps == 3


def test_a_file_is_not_lost_on_the_way_to_another_process(path, gaussians):
    """Three trainings by joblib, of ε = 7.6, left none in the file, nor in the ledger."""
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 3)
    with pytest.raises(TypeError, match=f"{path.name}, cannot be pickled.*merge"):
        pickle.dumps({"ledger": ledger})
    ledger.unlock()
    assert pickle.loads(pickle.dumps(ledger)).steps == 3


def test_a_model_that_is_copied_says_that_its_ledger_has_no_file(path):
    inputs = keras.Input((2,))
    model = dp.DPModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(dp.optimizers.DPSGD(clip_norm=1.0, noise_multiplier=1.0), "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        copy.deepcopy(model)
    model.ledger = Ledger(path)
    with pytest.warns(UserWarning, match=f"{path.name}, and that of a copy is not"):
        copied = pickle.loads(pickle.dumps(model))
    assert copied.ledger.path is None


def test_what_is_merged_is_on_file(path, gaussians):
    other = Ledger()
    run(other, gaussians(2.0), 7)
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 3)
    ledger.merge(other)
    assert Ledger.read(path).steps == ledger.steps == 10
    longer = Ledger.from_json(other.to_json())
    run(other, gaussians(2.0), 1)
    ledger.merge(longer)  # known already
    ledger.merge(other)
    assert Ledger.read(path).steps == ledger.steps == 11


def test_a_run_that_is_resumed_goes_on_in_the_file(path, gaussians):
    ledger = Ledger(path)
    run(ledger, gaussians(1.0), 3)
    name = ledger.current.run
    ledger.resume(name, 3)
    ledger.reserve(2)
    assert ledger.steps == Ledger.read(path).steps == 5
    assert len(ledger.segments) == len(Ledger.read(path).segments) == 1
    with pytest.raises(ValueError, match="no run"):
        ledger.resume(name, 3)


def test_shuffled_epochs_that_a_crash_broke_off(path, gaussians, make_ledger):
    ledger = Ledger(path)
    ledger.begin(gaussians(5.0), SHUFFLED)
    ledger.reserve(3)
    del ledger  # without a word
    ledger = Ledger(path)
    run(ledger, gaussians(5.0), 3, SHUFFLED)
    assert ledger.epsilon(DELTA) == pytest.approx(make_ledger(SHUFFLED, 20, 5.0).epsilon(DELTA))
