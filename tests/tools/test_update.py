"""make update writes one version everywhere, and says which outputs changed and where."""

import shutil

import pytest
from nbformat import from_dict
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tools import update


def test_a_version_is_written_everywhere_and_back(tmp_path):
    for name in ("mgpu_tutorial", "notebooks"):
        shutil.copytree(update.ROOT / name, tmp_path / name)
    for name in ("constraints.txt", "environment.yml", "README.md"):
        shutil.copy(update.ROOT / name, tmp_path / name)
    changed = update.pin(tmp_path, "2.99.1")
    pins = (tmp_path / "constraints.txt").read_text("utf-8")
    assert "\ntorch==2.99.1\n" in pins and "\ntorchvision==0.114.1\n" in pins
    conda = (tmp_path / "environment.yml").read_text("utf-8")
    assert "- pytorch=2.99\n  - torchvision=0.114\n" in conda
    for path in (tmp_path / "notebooks").glob("*.ipynb"):
        text = path.read_text("utf-8")
        assert "docs.pytorch.org/docs/2.99/" in text or "docs.pytorch.org" not in text
    pinned = (update.ROOT / "constraints.txt").read_text("utf-8").partition("\ntorch==")[2]
    assert update.pin(tmp_path, pinned.partition("\n")[0]) == changed
    for name in changed:
        assert (tmp_path / name).read_bytes() == (update.ROOT / name).read_bytes(), name


@pytest.mark.parametrize("word", ["2.14", "newest", "3.0.0", ""])
def test_what_is_no_version_is_refused(tmp_path, word):
    with pytest.raises(ValueError, match="such as 2.14.0"):
        update.pin(tmp_path, word)


def compared(tags=(), **given):
    data = {"text/plain": "a", "text/html": "svg+xml;base64,QUJD", "image/png": "AA"}
    data |= {key.replace("_", "/"): value for key, value in given.items()}
    cell = new_code_cell("draw()", id="a", outputs=[new_output("display_data", data=data)])
    cell.metadata.tags = list(tags)
    return update.compared(from_dict(new_notebook(cells=[cell])))


def test_what_is_compared_is_neither_time_nor_photograph():
    assert compared() == compared(image_png="BB") != compared(text_plain="b")
    free = ["nbval-ignore-output"]
    assert compared(free) == compared(free, text_plain="b")
    drawings = [f'<img src="data:image/svg+xml;base64,{text}">' for text in ("QQ", "RR")]
    assert compared(text_html=drawings[0]) != compared(text_html=drawings[1])
    assert "RR" not in str(compared(text_html=drawings[1]))
