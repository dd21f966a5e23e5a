"""make update writes one version everywhere."""

import shutil

import pytest

from tools import update


@pytest.mark.slow
def test_a_version_is_written_everywhere_and_back(tmp_path):
    for name in ("mgpu_tutorial", "notebooks"):
        shutil.copytree(update.ROOT / name, tmp_path / name)
    shutil.copytree(update.ROOT / "docs", tmp_path / "docs")
    for name in ("constraints.txt", "environment.yml", "pyproject.toml", "README.md"):
        shutil.copy(update.ROOT / name, tmp_path / name)
    changed = update.pin(tmp_path, "2.99.1")
    pins = (tmp_path / "constraints.txt").read_text("utf-8")
    assert "\ntorch==2.99.1\n" in pins and "\ntorchvision==0.114.1\n" in pins
    assert ',<2.100",\n' in (tmp_path / "pyproject.toml").read_text("utf-8")
    conda = (tmp_path / "environment.yml").read_text("utf-8")
    assert "- pytorch=2.99\n  - torchvision=0.114\n" in conda
    for path in (tmp_path / "notebooks").glob("*.ipynb"):
        text = path.read_text("utf-8")
        assert "docs.pytorch.org/docs/2.99/" in text or "docs.pytorch.org" not in text
    pinned = (update.ROOT / "constraints.txt").read_text("utf-8").partition("\ntorch==")[2]
    assert update.pin(tmp_path, pinned.partition("\n")[0]) == changed
    for name in changed:
        assert (tmp_path / name).read_bytes() == (update.ROOT / name).read_bytes(), name
    named = update.to_look_at(tmp_path)
    assert any(line.startswith("docs/security.md: PyTorch 2.") for line in named), named
    with pytest.raises(ValueError, match="such as 2.14.0"):
        update.pin(tmp_path, "2.14")
