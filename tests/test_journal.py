"""The journal survives what happens to files: cuts at every byte, flipped bytes, zeroes, stale bytes, a full disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.journal import JournalWriter, encode_frame, read_journal


def batch(start: int, rows: int = 3) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"a": list(range(start, start + rows)), "s": [f"r{i}" for i in range(start, start + rows)]})


def write(path: Path, batches: int) -> list[int]:
    """A journal of that many frames; returns where each ends."""
    journal = JournalWriter(path)
    ends = []
    for i in range(batches):
        journal.append(batch(3 * i))
        ends.append(journal.bytes)
    journal.close()
    return ends


def values(path: Path) -> list[int]:
    table = read_journal(path).table()
    return [] if table is None else table["a"].to_pylist()


def test_whole_journal_reads_back(tmp_path: Path) -> None:
    write(tmp_path / "j", 4)
    read = read_journal(tmp_path / "j")
    assert values(tmp_path / "j") == list(range(12))
    assert (read.rows, read.bytes_lost, read.frames_lost) == (12, 0, 0)


def test_empty_journal_has_no_rows(tmp_path: Path) -> None:
    write(tmp_path / "j", 0)
    read = read_journal(tmp_path / "j")
    assert (read.table(), read.rows, read.bytes_lost) == (None, 0, 0)


def test_journal_is_never_written_over(tmp_path: Path) -> None:
    write(tmp_path / "j", 1)
    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path / "j")


def test_cut_at_every_byte_keeps_every_whole_frame(tmp_path: Path) -> None:
    ends = write(tmp_path / "j", 3)
    data = (tmp_path / "j").read_bytes()
    cut = tmp_path / "cut"
    for size in range(len(data) + 1):
        cut.write_bytes(data[:size])
        whole = sum(end <= size for end in ends)
        read = read_journal(cut)
        assert read.rows == 3 * whole, size
        assert read.bytes_lost == size - ([0, *ends][whole]), size


@given(st.data())
def test_one_flipped_bit_costs_one_frame_at_most(data: st.DataObject) -> None:
    frames = [encode_frame(i, batch(3 * i)) for i in range(4)]
    whole = bytearray(b"".join(frames))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    hit = next(i for i in range(4) if at < sum(map(len, frames[: i + 1])))
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        path.write_bytes(whole)
        expected = [v for i in range(4) if i != hit for v in range(3 * i, 3 * i + 3)]
        assert values(path) == expected
        read = read_journal(path)
        assert read.bytes_lost == len(frames[hit])
        assert read.frames_lost == (1 if hit < 3 else 0)  # nothing follows the last one to show that it was there


@pytest.mark.parametrize("zeroes", [1, 15, 16, 100, 4096])
def test_zeroed_tail_is_no_data(tmp_path: Path, zeroes: int) -> None:
    """After a power loss some file systems give a file its length but not its bytes."""
    write(tmp_path / "j", 2)
    with (tmp_path / "j").open("ab") as f:
        f.write(b"\0" * zeroes)
    assert values(tmp_path / "j") == list(range(6))
    assert read_journal(tmp_path / "j").bytes_lost == zeroes


def test_stale_frame_behind_newer_ones_is_not_read_again(tmp_path: Path) -> None:
    old = encode_frame(0, batch(100))
    write(tmp_path / "j", 2)
    with (tmp_path / "j").open("ab") as f:
        f.write(old)
    assert values(tmp_path / "j") == list(range(6))


def test_frame_that_holds_the_magic_is_one_frame(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "j")
    inner = encode_frame(7, batch(0)).decode("latin-1")
    journal.append(pa.RecordBatch.from_pydict({"a": [1], "s": [inner]}))
    journal.append(batch(2))
    journal.close()
    assert values(tmp_path / "j") == [1, 2, 3, 4]


class HalfDisk:
    """A file on a disk with room for a little more."""

    def __init__(self, file: object, room: int) -> None:
        self.file = file
        self.room = room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = self.file.write(data[: self.room])  # type: ignore[attr-defined]
        self.room -= n
        return int(n)

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)


def test_full_disk_leaves_the_journal_as_it_was_and_room_lets_it_go_on(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "j")
    journal.append(batch(0))
    before = (tmp_path / "j").read_bytes()
    file = journal._file
    journal._file = HalfDisk(file, 40)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        journal.append(batch(3))
    assert (tmp_path / "j").read_bytes() == before
    assert journal.rows == 3
    journal._file = file
    journal.append(batch(6))
    journal.close()
    assert values(tmp_path / "j") == [0, 1, 2, 6, 7, 8]
    assert read_journal(tmp_path / "j").frames_lost == 0
