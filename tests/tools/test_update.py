"""make update writes one version everywhere, and says which outputs changed and where."""

import shutil

import pytest
from nbformat import from_dict
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import update


@pytest.fixture
def copy(tmp_path):
    for name in ("mgpu_tutorial", "notebooks"):
        shutil.copytree(update.ROOT / name, tmp_path / name)
    for name in ("constraints.txt", "environment.yml", "README.md"):
        shutil.copy(update.ROOT / name, tmp_path / name)
    return tmp_path


def test_a_version_is_written_everywhere_and_back(copy):
    pinned = (copy / "constraints.txt").read_text("utf-8").partition("\ntorch==")[2]
    changed = update.pin(copy, "2.99.1")
    pins = (copy / "constraints.txt").read_text("utf-8")
    assert "\ntorch==2.99.1\n" in pins and "\ntorchvision==0.114.1\n" in pins
    conda = (copy / "environment.yml").read_text("utf-8")
    assert "- pytorch=2.99\n  - torchvision=0.114\n" in conda
    for path in (copy / "notebooks").glob("*.ipynb"):
        text = path.read_text("utf-8")
        assert "docs.pytorch.org/docs/2.99/" in text or "docs.pytorch.org" not in text
    assert update.pin(copy, pinned.partition("\n")[0]) == changed
    for name in changed:
        assert (copy / name).read_bytes() == (update.ROOT / name).read_bytes(), name


@pytest.mark.parametrize("word", ["2.14", "newest", "3.0.0", ""])
def test_what_is_no_version_is_refused(tmp_path, word):
    with pytest.raises(ValueError, match="such as 2.14.0"):
        update.pin(tmp_path, word)


def run(printed="a", free="1.0", drawing="QUJD", photograph="AAAA"):
    picture = f'<img src="data:image/svg+xml;base64,{drawing}">'
    outputs = {
        "print": new_output("stream", name="stdout", text=printed),
        "clock": new_output("stream", name="stdout", text=free),
        "draw": new_output("display_data", data={"text/html": picture}),
        "photograph": new_output("display_data", data={"image/png": photograph}),
    }
    cells = [new_code_cell(f"{name}()", id=name, outputs=[o]) for name, o in outputs.items()]
    cells[1].metadata.tags = ["nbval-ignore-output"]
    return update.compared(
        from_dict(new_notebook(cells=[new_markdown_cell("#", id="m"), *cells]))
    )


def test_what_is_compared_is_neither_time_nor_photograph():
    assert run() == run(free="2.0", photograph="BBBB")
    assert run() != run(printed="b") and run() != run(drawing="REVG")
    assert "REVG" not in str(run(drawing="REVG"))
