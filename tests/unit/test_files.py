"""Files and folders that are complete or absent."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from mrl import files
from mrl.launcher.logs import lock_log_dir
from mrl.observe.lock import Lock
from tests.helpers.full_disk import full_disk


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Writes a file with old content."""
    file = tmp_path / "notes.json"
    file.write_text("old")
    return file


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_where_nothing_can_be_locked_no_run_begins_and_all_can_be_read(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Without file locks no run starts, but files can be read: Lustre without -o flock, NFS without its daemon."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    for begin in (lambda: Lock(tmp_path / "run" / "lock"), lock_log_dir(tmp_path / "run" / "logs").__enter__):
        (tmp_path / "run").mkdir(exist_ok=True)
        with pytest.raises(files.NoLocks, match=rf"^the file system of {tmp_path}\S* has no locks .*-o localflock"):
            begin()
    with file.open() as reader:
        files.lock_for_reading(reader)
        assert reader.read() == "old"


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("content", ["néw", "néw".encode()])
def test_a_file_gets_its_new_content(file: Path, content: str | bytes, durable: bool) -> None:
    files.write_atomically(file, content, durable=durable)
    assert file.read_bytes() == "néw".encode()
    assert list(file.parent.iterdir()) == [file]


def test_who_reads_meanwhile_has_the_old_content(file: Path) -> None:
    with file.open() as reader:
        files.write_atomically(file, "new")
        assert (reader.read(), file.read_text()) == ("old", "new")


@pytest.mark.parametrize("durable", [False, True])
def test_a_full_disk_leaves_the_old_content_alone(file: Path, durable: bool) -> None:
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        files.write_atomically(file, "new" * 100, durable=durable)
    assert file.read_text() == "old"
    assert list(file.parent.iterdir()) == [file]


def test_a_write_that_a_signal_breaks_off_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(path: Path) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(files, "sync", stopped)
    with pytest.raises(SystemExit):
        files.write_atomically(file, "new", durable=True)
    assert file.read_text() == "old"
    assert list(file.parent.iterdir()) == [file]


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_atomically(tmp_path / "new", "")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_a_durable_file_is_on_the_disk_before_it_has_its_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(files, "sync", lambda path: seen.append((path.is_dir(), file.read_text())))
    files.write_atomically(file, "new", durable=True)
    assert seen == [(False, "old"), (True, "new")], "(a folder?, what the name led to), in this order"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Makes a folder with three entries: an empty folder and two files within it."""
    tree = tmp_path / "model.partial"
    (tree / "weights" / "empty").mkdir(parents=True)
    (tree / "weights" / "part").write_bytes(bytes(7))
    (tree / "config.json").write_text("{}")
    return tree


def test_a_manifest_has_the_size_of_every_file(tree: Path) -> None:
    assert list(files.sizes(tree).items()) == [("config.json", 2), ("weights/part", 7)]


def test_all_folders_of_a_tree_are_made_durable(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(files, "sync", seen.append)
    files.sync_folders(tree)
    assert set(seen) == {tree, tree / "weights", tree / "weights" / "empty"}
    assert seen[-1] == tree


def test_a_folder_gets_its_name_for_good(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final, seen = tree.with_name("model"), []
    monkeypatch.setattr(files, "sync", lambda path: seen.append((path, final.is_dir())))
    files.rename_durably(tree, final)
    assert seen == [(tree.parent, True)], "the new name is made durable after it is given"
    assert not tree.exists() and (final / "weights" / "part").is_file()
