"""Whole files, JSON, digests and locks: killed, without space, without permission, by two."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jali import files
from jali.files import (
    LockedError,
    UnreadableError,
    WriteError,
    canonical,
    check_place,
    digest,
    file_digest,
    lock,
    make_folder,
    path_inside,
    read_json,
    read_text,
    whole_file,
    write_bytes,
    write_json,
    write_text,
)


def child(code: str, *words: object) -> subprocess.Popen[str]:
    """A process of its own that runs `code` with `words` in sys.argv."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def heard(process: subprocess.Popen[str], word: str) -> None:
    """Wait until the process has printed `word`."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line == word, process.communicate()[1]


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond `size`, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that is there already."""
    path = tmp_path / "result.json"
    path.write_text("old")
    return path


def test_a_file_is_replaced_whole_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "text"
    write_text(path, "fürs erste")
    assert path.read_bytes() == "fürs erste".encode()
    write_bytes(path, b"second", durable=False)
    assert path.read_bytes() == b"second"
    assert os.listdir(path.parent) == ["text"]


def test_what_is_raised_inside_leaves_the_old_file_and_nothing_else(old: Path) -> None:
    for error in (ValueError("no"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)), whole_file(old) as temporary:  # noqa: PT012
            temporary.write_text("half")
            raise error
        assert os.listdir(old.parent) == [old.name]
        assert old.read_text() == "old"


def test_an_error_of_the_system_names_the_file_once(old: Path) -> None:
    with pytest.raises(WriteError) as caught, whole_file(old):
        write_text(old / "inside", "a file is no folder")
    assert str(caught.value) == f"{old} cannot be made: File exists"
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(WriteError) as caught, whole_file(old):
        raise OSError(errno.EIO, "Input/output error")
    assert str(caught.value) == f"{old} cannot be written: Input/output error"
    assert os.listdir(old.parent) == [old.name]


def test_killed_in_the_middle_the_old_file_stays(old: Path) -> None:
    process = child(
        """
        import sys, time
        from pathlib import Path
        from jali.files import whole_file
        with whole_file(Path(sys.argv[1])) as temporary:
            temporary.write_text("half")
            print("half", flush=True)
            time.sleep(60)
        """,
        old,
    )
    heard(process, "half")
    kill(process)
    assert old.read_text() == "old"
    left = [name for name in os.listdir(old.parent) if name != old.name]
    assert [name.startswith(f".{old.name}.") and name.endswith(".part") for name in left] == [True]
    write_text(old, "new")  # the next one clears it away
    assert old.read_text() == "new"
    assert os.listdir(old.parent) == [old.name]


def test_what_others_are_writing_stays(old: Path) -> None:
    strange = [f".{old.name}.part", f".{old.name}.mine.part", f".{old.name}x.01234567.part"]
    for name in strange:
        (old.parent / name).write_text("not ours")
    with whole_file(old) as first:
        first.write_text("first")
        with whole_file(old) as second:
            second.write_text("second")
            assert first.exists()
        assert old.read_text() == "second"
    assert old.read_text() == "first"
    assert sorted(os.listdir(old.parent)) == sorted([*strange, old.name])


def test_many_at_once_all_succeed(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from jali.files import write_text
        for number in range(200):
            write_text(Path(sys.argv[1]), "x" * number, durable=False)
    """
    processes = [child(code, tmp_path / "state.json") for _ in range(3)]
    assert [process.communicate()[1] for process in processes] == [""] * 3
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127])
def test_the_longest_names_can_be_written(tmp_path: Path, name: str) -> None:
    write_text(tmp_path / name, "x")
    assert os.listdir(tmp_path) == [name]
    with pytest.raises(WriteError, match="cannot be written: File name too long"):
        write_text(tmp_path / f"{name}xx", "x")


def test_a_full_disk_leaves_the_old_file(old: Path) -> None:
    with largest_file(1000), pytest.raises(WriteError, match="cannot be written: File too large"):
        write_bytes(old, bytes(5000))
    assert old.read_text() == "old"
    assert os.listdir(old.parent) == [old.name]


@contextmanager
def nobody() -> Iterator[None]:
    """Root may write everywhere, so it becomes somebody who may not."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


def test_a_folder_without_permission() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to others
        folder = Path(name)
        (folder / "old").write_text("old")
        folder.chmod(0o555)
        with nobody():
            with pytest.raises(WriteError, match="old cannot be written: Permission denied"):
                write_text(folder / "old", "new")
            with pytest.raises(WriteError, match="deeper cannot be made: Permission denied"):
                make_folder(folder / "deeper")
            for name in ("new", "old", "deeper/new"):
                with pytest.raises(
                    WriteError, match=rf"{name} cannot be made: .* open for writing"
                ):
                    check_place(folder / name)
            with (
                pytest.raises(WriteError, match="lock cannot be locked: Permission denied"),
                lock(folder / "lock", "busy"),
            ):
                pass
        assert (folder / "old").read_text() == "old"
        assert os.listdir(folder) == ["old"]
        folder.chmod(0o755)


def test_places_that_cannot_be_files(old: Path) -> None:
    folder = old.parent / "folder"
    folder.mkdir()
    with pytest.raises(WriteError, match="folder cannot be written: Is a directory"):
        write_text(folder, "x")
    check_place(old)
    check_place(old.parent / "new" / "and" / "deeper")
    with pytest.raises(WriteError, match=r"inside cannot be made: .* is not a folder"):
        check_place(old / "inside")
    with pytest.raises(WriteError, match="cannot be made: File name too long"):
        check_place(old.parent / ("x" * 300) / "y")
    for path, reason in [
        (old / "inside", "Not a directory"),
        (old.parent / "gone" / "file", "No such file or directory"),
    ]:
        with pytest.raises(WriteError, match=f"cannot be written: {reason}"), whole_file(path):
            pass
    assert sorted(os.listdir(old.parent)) == ["folder", old.name]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_decides_who_may_read(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    value = {"kind": "jali-test", "version": 1, "name": "ü", "list": [1, 2.5, None]}
    write_json(path, value)
    assert read_json(path) == read_json(path, "jali-test") == value
    assert list(json.loads(path.read_text())) == sorted(value)
    assert path.read_text().endswith("}\n")
    write_json(path, value, sort_keys=False)
    assert list(json.loads(path.read_text())) == list(value)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert read_json(path) == value


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b'{"a": 1', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[1, 2]", "holds a list, not an object"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "has 5,000 digits"),
        (b'{"a": -' + b"9" * 400 + b"}", "has 401 digits"),
        (b'{"a": NaN}', "the number NaN is not finite"),
        (b'{"a": [-Infinity]}', "the number -Infinity is not finite"),
        (b'{"a": 1e999}', "the number 1e999 is not finite"),
        (b'{"a": {"b": 1, "b": 2}}', "the name 'b' is given twice"),
        (b'{"a": "\\ud800"}', "is not one that can be written"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "nested too deep"),
        (b'{"kind": "' + b"x" * 100_000 + b'", "version": 1}', "its kind is 'xxx"),
        (
            b'{"kind": "other", "version": 1}',
            "is not a jali-test file of version 1: its kind is 'o",
        ),
        (b'{"kind": "jali-test", "version": 2}', "its version 2"),
    ],
    ids=[
        "empty",
        "cut",
        "bytes",
        "list",
        "deep",
        "digits",
        "400 digits",
        "nan",
        "infinity",
        "1e999",
        "twice",
        "half a letter",
        "500 deep",
        "long kind",
        "kind",
        "version",
    ],
)
def test_json_that_is_not_what_it_should_be(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "value.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=words) as caught:
        read_json(path, "jali-test")
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < len(str(path)) + 400
    assert "\n" not in str(caught.value)


def test_json_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "gone.json")
    with pytest.raises(UnreadableError, match="cannot be read: Is a directory"):
        read_json(tmp_path)
    monkeypatch.setattr(files, "LARGEST_JSON", 10)
    path = tmp_path / "large.json"
    write_json(path, {"a": list(range(20))})
    with pytest.raises(UnreadableError, match=r"large\.json has \d+ bytes; .* at most 10$"):
        read_json(path)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(UnreadableError, match=f"{path} is not a regular file"):
            read_json(path)
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfa text")
    assert read_text(path, 100) == "a text"
    with pytest.raises(UnreadableError, match="has 9 bytes; files of this kind have at most 8"):
        read_text(path, 8)
    path.write_bytes(b"ab\xff")
    with pytest.raises(UnreadableError, match="is no text in UTF-8: byte 2 of it is 0xff"):
        read_text(path, 100)


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../a", "/etc/passwd", "a/b", "a/", "a\\b", "a\0b", "a\nb", "\ud800",
        "x" * 300, 5, None,
    ],
)  # fmt: skip
def test_a_name_is_one_file_of_its_folder(tmp_path: Path, name: object) -> None:
    with pytest.raises(ValueError, match="is not the name of a file in its folder"):
        path_inside(tmp_path, name)


def test_links_stay_in_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for target, works in (("../out", False), ("/etc/passwd", False), ("in", True), ("..", False)):
        link = folder / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        if works:
            assert path_inside(folder, "link") == link
        else:
            with pytest.raises(ValueError, match="'link' is a link that leads out of its folder"):
                path_inside(folder, "link")
    (tmp_path / "other").symlink_to(folder)  # the folder itself may be anywhere
    assert path_inside(tmp_path / "other", "link ü.mp4").name == "link ü.mp4"


def test_digests_know_bytes_texts_and_values(tmp_path: Path) -> None:
    expected = hashlib.sha256(b'{"a":"\xc3\xbc","b":1}').hexdigest()
    assert canonical({"b": 1, "a": "ü"}) == '{"a":"ü","b":1}'
    assert digest({"b": 1, "a": "ü"}) == digest('{"a":"ü","b":1}') == expected
    write_bytes(tmp_path / "file", '{"a":"ü","b":1}'.encode())
    assert file_digest(tmp_path / "file") == expected
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical(float("inf"))


HOLD = """
    import sys, time
    from pathlib import Path
    from jali.files import LockedError, lock
    try:
        with lock(Path(sys.argv[1]), "somebody is at work there"):
            print("held", flush=True)
            time.sleep(float(sys.argv[2]))
    except LockedError as error:
        print(error, flush=True)
"""


def test_a_lock_keeps_others_out_until_its_holder_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = child(HOLD, path, 60)
    heard(holder, "held")
    with pytest.raises(LockedError, match=r"^no, wait$"), lock(path, "no, wait"):
        pytest.fail("two have it")
    kill(holder)  # however it ends
    with lock(path, "no, wait"):
        other = child(HOLD, path, 0)
        heard(other, "somebody is at work there")
        other.communicate()
        with pytest.raises(LockedError), lock(path, "this process has it already"):
            pytest.fail("two have it")
    other = child(HOLD, path, 0)  # let go when the block ended
    heard(other, "held")
    other.communicate()


def test_what_is_raised_under_a_lock_is_its_own_and_lets_it_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(OSError, match=r"^of the block$"), lock(path, "busy"):
        raise OSError("of the block")
    with lock(path, "busy"):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_the_log_says_so(
    tmp_path: Path,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def none(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", none)
    with caplog.at_level(logging.WARNING, "jali"), lock(tmp_path / "lock", "busy"):
        pass
    assert "a file system without locks" in caplog.text
