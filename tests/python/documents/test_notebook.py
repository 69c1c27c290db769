"""The notebook runs from top to bottom, and its outputs are as expected."""

from pathlib import Path
from typing import Any

import pytest

from realmodels import catalogued_path

NOTEBOOK = Path(__file__).resolve().parents[3] / "examples" / "quickstart.ipynb"
if not NOTEBOOK.exists():
    pytest.skip("needs the examples", allow_module_level=True)
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


def test_the_notebook_has_no_outputs() -> None:
    """The notebook is valid and has no outputs or execution counts of a particular run."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None)


def printed(cell: Any) -> str:
    """Return the text output of a cell."""
    return "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)


@pytest.mark.builds
def test_every_cell_runs(tmp_path: Path) -> None:
    """Every cell runs in a new kernel; a cell that raises fails the test."""
    for name in ("minilm", "smollm2"):
        catalogued_path(name)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3",
                            resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [printed(cell) for cell in cells]
    assert shown[1].splitlines()[0].endswith("Bread rises because yeast gives off carbon dioxide.")
    assert shown[2].startswith(" Paris.") and "length" in shown[2]
    assert len(shown[3]) > 10 and "One, two, three, four, five" in shown[4]
    table = cells[5].outputs[0]["data"]
    assert table["text/html"].count("<tr>") == 3 and "all-MiniLM-L6-v2" in table["text/plain"]
    assert shown[6] == "['cold', 'cold']"
