"""What identifies a checkpoint, and files that are replaced whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from evaluation import provenance
from evaluation.provenance import checkpoint_identity, write_atomically


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "models--a--b" / "snapshots" / ("0123456789" * 4)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(range(100)))
    return directory


def test_a_checkpoint_is_its_names_and_contents(checkpoint: Path) -> None:
    first = checkpoint_identity(checkpoint)
    assert first["commit"] == "0123456789" * 4
    (checkpoint / "README.md").write_text("not a weight")
    assert checkpoint_identity(checkpoint) == first
    (checkpoint / "model.safetensors").write_bytes(bytes([*range(50), 0, *range(51, 100)]))
    assert checkpoint_identity(checkpoint)["sha256"] != first["sha256"]
    (checkpoint / "model.safetensors").write_bytes(bytes(range(100)))
    assert checkpoint_identity(checkpoint) == first
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    assert checkpoint_identity(checkpoint)["sha256"] != first["sha256"]


def test_of_large_files_both_ends_and_the_size_count(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_SAMPLED", 50)
    monkeypatch.setattr(provenance, "_END", 10)
    content = bytes(range(100))

    def hashed(data: bytes) -> str:
        (checkpoint / "model.safetensors").write_bytes(data)
        return checkpoint_identity(checkpoint)["sha256"]

    first = hashed(content)
    assert hashed(content[:40] + b"\xff" + content[41:]) == first  # the middle isn't read, as documented
    assert len({first, hashed(b"\xff" + content[1:]), hashed(content[:-1] + b"\xff"), hashed(content + b"\xff")}) == 4


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]
    write_atomically(path, "new")
    assert path.read_text() == "new"
