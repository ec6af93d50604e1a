"""Directories that are complete or absent, and the manifest that marks them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mrl import directories
from mrl.directories import Staging, Unwritable, read_manifest, write_manifest
from mrl.failure import describe
from tests.helpers.full_disk import full_disk


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    staging = Staging(tmp_path / "model", 100)
    staging.begin()
    (staging.directory / "release").mkdir()
    (staging.directory / "release" / "part").write_bytes(bytes(7))
    return staging


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_has_the_name_before_all_is_durable(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(staging.directory, {"version": 1})
    synced: list[str] = []
    for module in (directories, __import__("mrl.files").files):
        monkeypatch.setattr(module, "sync", lambda path: synced.append(f"{path.name} {staging.target.exists()}"))
    staging.commit()
    staging.end()
    folder = staging.directory.name
    assert synced[:4] == ["complete False", "part False", "release False", f"{folder} False"]
    assert synced[4:] == [f"{staging.target.parent.name} True"]
    assert read_manifest(staging.target, version=1)["files"] == {"release/part": 7}
    assert names(staging.target.parent) == ["model"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_accounts_that_may_read_the_directory_may_read_its_tensors(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        staging = Staging(tmp_path / "model", 100)
        staging.begin()
        (staging.directory / "config.json").write_text("{}")
        save_file({"a": torch.zeros(1)}, staging.directory / "model.safetensors")
        staging.commit()
        staging.end()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in staging.target.iterdir()} == {mode}


def test_what_is_not_committed_leaves_nothing(staging: Staging) -> None:
    staging.end()
    assert names(staging.target.parent) == []


def test_what_a_killed_process_left_is_removed(staging: Staging) -> None:
    os.close(staging._lock)  # as the end of its process does
    again = Staging(staging.target, 100)
    again.begin()
    assert names(again.directory) == []
    again.end()


def test_a_place_that_is_taken(staging: Staging) -> None:
    with pytest.raises(Unwritable, match="another process is writing there"):
        Staging(staging.target, 0).begin()
    assert staging.directory.is_dir(), "the other one's is left alone"
    staging.commit()
    staging.end()
    with pytest.raises(Unwritable, match="model exists and is not empty"):
        Staging(staging.target, 0).begin()
    with pytest.raises(Unwritable, match="exists and is not empty"):
        Staging(staging.target / "release" / "part", 0, overwrite=True).begin()
    assert names(staging.target.parent) == ["model"]


def test_without_room_nothing_is_begun(tmp_path: Path) -> None:
    with pytest.raises(Unwritable, match=r"not enough disk space for .*model: 1e\+06 TB needed, .* free"):
        Staging(tmp_path / "model", 10**18).begin()
    assert names(tmp_path) == []


def test_a_target_that_a_killed_process_had_moved_away_gets_its_name_back(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging.commit()
    staging.end()
    new = Staging(staging.target, 0, overwrite=True)
    new.begin()

    def killed(path: Path, final: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(directories, "rename_durably", killed)
        new.commit()
    os.close(new._lock)
    again = Staging(staging.target, 0, overwrite=True)
    again.begin()
    again.end()
    assert names(staging.target) == ["release"] and names(staging.target.parent) == ["model"]


def test_the_old_one_is_there_until_the_new_one_is_whole(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    staging.commit()
    staging.end()
    new = Staging(staging.target, 0, overwrite=True)
    new.begin()
    (new.directory / "other").touch()

    def full(path: Path, final: Path) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(directories, "rename_durably", full)
        with pytest.raises(OSError, match="disk full"):
            new.commit()
    assert names(new.target) == ["release"]
    new.commit()
    new.end()
    assert names(new.target) == ["other"] and names(new.target.parent) == ["model"]


def test_a_full_disk_leaves_no_manifest(staging: Staging) -> None:
    with full_disk(20), pytest.raises(OSError, match="File too large"):
        write_manifest(staging.directory, {"what": "x" * 100})
    with pytest.raises(ValueError, match=r"is incomplete: it has no file 'complete'; write it again"):
        read_manifest(staging.directory, remedy="write it again")
    assert names(staging.directory) == ["release"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "release/part").write_bytes(b""), "release/part has 0 bytes instead of 7; again"),
        (lambda path: shutil.rmtree(path / "release"), "is damaged: release/part is missing; again"),
        (lambda path: edit(path, version=2), "has format toy 2, and this version of mrl reads format toy 1"),
        (lambda path: edit(path, files={"/etc/hostname": 1}), "names '/etc/hostname', outside of the directory"),
        (lambda path: edit(path, files={"../model": 1}), "names '../model', outside of the directory"),
        (lambda path: edit(path, files=["part"]), "complete is not a list of files"),
        (lambda path: edit(path, files={str(n): 1 for n in range(20)}), "7 is missing; ...; again"),
        (lambda path: (path / "complete").write_text("[]"), "complete is not a list of files"),
        (lambda path: (path / "complete").write_text("{"), "complete cannot be read as JSON"),
    ],
)
def test_a_directory_that_is_not_whole_is_refused(staging: Staging, change: object, message: str) -> None:
    write_manifest(staging.directory, {"format": "toy", "version": 1})
    change(staging.directory)  # type: ignore[operator]
    with pytest.raises(ValueError) as refused:
        read_manifest(staging.directory, remedy="again", format="toy", version=1)
    assert message in str(refused.value)
    assert describe(refused.value) == str(refused.value), "a user's problem, without the place in the code"


def edit(directory: Path, **changes: object) -> None:
    manifest = json.loads((directory / "complete").read_text()) | changes
    (directory / "complete").write_text(json.dumps(manifest))
