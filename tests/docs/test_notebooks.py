"""The notebooks of the documentation run from top to bottom, and are committed without outputs."""

import json
import pathlib

import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "tutorials" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module", params=PATHS, ids=lambda path: path.stem)
def executed(request):
    """(name, the notebook with its outputs); an exception in a cell fails here."""
    notebook = nbformat.read(request.param, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(FIGURES[request.param.stem]))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MPLBACKEND", raising=False)  # so that pictures come to the notebook
        nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    return request.param.stem, notebook


#: Run after the last cell: what the notebook claims to have found, as JSON.
FIGURES = {
    "first_private_model": """import json
print(json.dumps({"accuracy": list(accuracy.values()), "spent": list(spent.values())[:3]}))""",
    "choosing_an_optimizer": """import json
print(json.dumps({"accuracy": [h["val_accuracy"][-1] for h in histories.values()],
                  "spent": [h["epsilon"][-1] for h in histories.values()]}))""",
}


def test_both_notebooks_are_there_without_outputs():
    assert [path.stem for path in PATHS] == sorted(FIGURES)
    for path in PATHS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert all(not cell.outputs and cell.execution_count is None for cell in cells)


def test_a_notebook_runs_and_finds_what_it_says(executed):
    name, notebook = executed
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == {"first_private_model": 1, "choosing_an_optimizer": 2}[name]
    figures = json.loads(outputs[-1].text)
    asked = {"first_private_model": [0.5, 2.0, 8.0], "choosing_an_optimizer": [2.0] * 4}[name]
    for spent, limit in zip(figures["spent"], asked, strict=True):
        assert 0.9 * limit < spent <= limit
    assert max(figures["accuracy"]) > 0.8  # of ten classes
    assert min(figures["accuracy"]) > 0.2
