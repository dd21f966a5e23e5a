"""make update writes one version everywhere, and says which outputs changed and where."""

import shutil

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools.update import ROOT, differences, pin


@pytest.fixture
def copy(tmp_path):
    for name in ("mgpu_tutorial", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("constraints.txt", "environment.yml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_version_is_written_everywhere_and_back(copy):
    changed = pin(copy, "2.99.1")
    assert {"constraints.txt", "environment.yml"} < set(changed)
    pins = (copy / "constraints.txt").read_text(encoding="utf-8")
    assert "\ntorch==2.99.1\n" in pins and "\ntorchvision==0.114.1\n" in pins
    assert "- pytorch=2.99\n  - torchvision=0.114\n" in (copy / "environment.yml").read_text(
        encoding="utf-8"
    )
    for path in (copy / "notebooks").glob("*.ipynb"):
        text = path.read_text(encoding="utf-8")
        assert "docs.pytorch.org/docs/2.99/" in text or "docs.pytorch.org" not in text
    torch = next(
        line
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "torch==" in line
    )
    assert set(pin(copy, torch.removeprefix("torch=="))) == set(changed)
    for name in changed:
        assert (copy / name).read_bytes() == (ROOT / name).read_bytes(), name


@pytest.mark.parametrize("word", ["2.14", "newest", "3.0.0", ""])
def test_what_is_no_version_is_refused(copy, word):
    with pytest.raises(ValueError, match="such as 2.14.0"):
        pin(copy, word)


def run(printed, free="1.0", drawing="QUJD", photograph="AAAA"):
    picture = f'<img src="data:image/svg+xml;base64,{drawing}">'
    cells = [
        new_markdown_cell("# Title"),
        new_code_cell("f()", outputs=[new_output("stream", name="stdout", text=printed)]),
        new_code_cell(
            "clock()",
            outputs=[new_output("stream", name="stdout", text=free)],
            metadata={"tags": ["nbval-ignore-output"]},
        ),
        new_code_cell("g()", outputs=[shown(**{"text/html": picture})]),
        new_code_cell("h()", outputs=[shown(**{"image/png": photograph})]),
    ]
    return nbformat.from_dict(new_notebook(cells=cells))


def shown(**data):
    return new_output("display_data", data=data)


def test_a_changed_output_is_listed_with_its_cell():
    found = list(differences(run("a\nb\nc\n"), run("a\nB\nc\n")))
    assert found == [(2, "-b\n+B")]


def test_a_changed_drawing_is_listed_without_its_bytes():
    [(number, lines)] = differences(run("a"), run("a", drawing="REVG"))
    assert number == 4 and lines.count("(drawing ") == 2 and "REVG" not in lines


def test_times_and_photographs_are_not_listed():
    assert not list(differences(run("a"), run("a", free="2.0", photograph="BBBB")))


def test_a_long_difference_is_cut():
    [(_, lines)] = differences(run(""), run("x\n" * 40))
    assert lines.endswith("… and 28 more lines")
