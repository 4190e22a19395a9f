"""The channel between an engine and hoptrace: bounded, never waiting, in order, and what was written outlives the writer."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoptrace.collectors.inside import channel, ring

SMALL = 65536


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOPTRACE_CHANNELS", str(tmp_path / "channels"))
    monkeypatch.delenv("HOPTRACE_CHANNEL_BYTES", raising=False)
    monkeypatch.delenv("HOPTRACE_VLLM", raising=False)
    return tmp_path / "channels"


def number(payload: bytes) -> int:
    return int(payload.split(b" ", 1)[0])


@given(st.lists(st.one_of(st.integers(0, 20000), st.none()), max_size=60), st.booleans())
def test_frames_come_in_order_and_what_is_missing_is_counted(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int | None], little: bool
) -> None:
    """Integers write a frame of that size, null reads: read + missed = written, each frame whole, once and in order."""
    path = tmp_path_factory.mktemp("ring") / "a.ring"
    writer = ring.Writer(path, SMALL, ring.JSON, {"role": "api"})
    reader = ring.Reader(path)
    seen: list[int] = []
    written = 0
    try:
        for step in [*steps, None]:
            if step is None:
                while frames := reader.read(1000 if little else 1 << 20):
                    for f in frames:
                        assert f == f"{number(f)} ".encode() + bytes(len(f) - len(f"{number(f)} "))
                        seen.append(number(f))
            else:
                assert writer.put(f"{written} ".encode() + bytes(step), 1)
                written += 1
        assert seen == sorted(set(seen))
        assert len(seen) + reader.missed == written
        assert not seen or seen[-1] == written - 1
        assert reader.damaged == 0 and reader.lost == 0
    finally:
        reader.close()
        writer.close()


@given(st.lists(st.binary(max_size=200), max_size=50))
def test_nothing_is_missing_where_there_is_room(tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("ring") / "a.ring"
    writer = ring.Writer(path, SMALL, ring.MSGPACK, {})
    for p in payloads:
        writer.put(p, 1)
    reader = ring.Reader(path)
    assert reader.read() == payloads and reader.missed == 0 and reader.read() == []
    reader.close()
    writer.close()


def test_a_late_reader_begins_now_or_at_the_oldest(tmp_path: Path) -> None:
    writer = ring.Writer(tmp_path / "a.ring", SMALL, ring.JSON, {})
    for i in range(3):
        writer.put(b"%d " % i, 1)
    late, all_ = ring.Reader(tmp_path / "a.ring", from_start=False), ring.Reader(tmp_path / "a.ring")
    writer.put(b"3 ", 1)
    assert [number(f) for f in late.read()] == [3]
    assert [number(f) for f in all_.read()] == [0, 1, 2, 3]
    assert late.missed == all_.missed == 0


def test_header_says_who_writes(tmp_path: Path) -> None:
    before = time.monotonic_ns(), time.time_ns()
    ring.Writer(tmp_path / "a.ring", SMALL, ring.JSON, {"role": "engine", "dp_rank": 3, "config": {"layers": 2}})
    header = ring.read_header(tmp_path / "a.ring")
    assert header.pid == os.getpid() and header.role == "engine" and header.about["config"] == {"layers": 2}
    assert before[0] <= header.monotonic_ns and before[1] - 10**9 <= header.realtime_ns
    stat = Path("/proc/self/stat").read_text()
    assert header.start_ticks == int(stat[stat.rindex(")") + 2 :].split()[19])
    assert header.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (tmp_path / "a.ring").stat().st_mode & 0o777 == 0o600


def test_a_configuration_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    ring.Writer(tmp_path / "a.ring", SMALL, ring.JSON, {"role": "api", "config": {"x": "y" * 100_000}})
    assert ring.read_header(tmp_path / "a.ring").about == {"role": "api"}


def test_a_frame_larger_than_half_the_room_is_lost_and_counted(tmp_path: Path) -> None:
    writer = ring.Writer(tmp_path / "a.ring", SMALL, ring.JSON, {})
    assert not writer.put(bytes(SMALL // 2), 1)
    assert writer.put(b"x", 1)
    reader = ring.Reader(tmp_path / "a.ring")
    assert reader.read() == [b"x"] and reader.lost == 1


@pytest.mark.parametrize("at", [0, 3, 5, 17, 34, 35])
def test_a_damaged_frame_is_counted_and_not_believed(tmp_path: Path, at: int) -> None:
    writer = ring.Writer(tmp_path / "a.ring", SMALL, ring.JSON, {})
    for i in range(3):
        writer.put(b"%d " % i, 1)
    with (tmp_path / "a.ring").open("r+b") as f:
        f.seek(ring.HEADER_BYTES + at)
        byte = f.read(1)
        f.seek(ring.HEADER_BYTES + at)
        f.write(bytes([byte[0] ^ 0x40]))
    reader = ring.Reader(tmp_path / "a.ring")
    whole = [0] if at >= 32 else []
    assert [number(f) for f in reader.read()] == whole
    while reader.pending:
        assert reader.read() == []
    writer.put(b"9 ", 1)
    assert [number(f) for f in reader.read()] == [9]
    assert (reader.damaged, reader.missed) == (1, 3 - len(whole))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.ring").write_bytes(b"x" * 100_000)
    (tmp_path / "short.ring").write_bytes(b"HOPTRACE")
    with pytest.raises(ring.RingError, match="no hoptrace channel"):
        ring.Reader(tmp_path / "no.ring")
    with pytest.raises(ring.RingError):
        ring.Reader(tmp_path / "short.ring")
    ring.Writer(tmp_path / "a.ring", SMALL, ring.JSON, {})
    whole = (tmp_path / "a.ring").read_bytes()
    (tmp_path / "cut.ring").write_bytes(whole[:-1])
    with pytest.raises(ring.RingError, match="cut short"):
        ring.Reader(tmp_path / "cut.ring")
    (tmp_path / "newer.ring").write_bytes(whole[:8] + (2).to_bytes(4, sys.byteorder) + whole[12:])
    with pytest.raises(ring.RingError, match="version 2"):
        ring.Reader(tmp_path / "newer.ring")
    (tmp_path / "link.ring").symlink_to(tmp_path / "a.ring")
    with pytest.raises(OSError) as e:
        ring.Reader(tmp_path / "link.ring")
    assert e.value.errno == errno.ELOOP


_WRITER = """
import sys
from pathlib import Path
from hoptrace.collectors.inside import ring
w = ring.Writer(Path(sys.argv[1]), 1 << 20, ring.JSON, {"role": "api"})
i = 0
while i < int(sys.argv[2]):
    w.put(b"%d " % i + bytes(i % 700), 1)
    i += 1
    if i % 50 == 0:
        print(i, flush=True)
"""


def test_what_was_written_outlives_a_kill(tmp_path: Path) -> None:
    """kill -9 at any instant: all that the writer had told of is there, in order and whole, and it is known to be dead."""
    path = tmp_path / "a.ring"
    process = subprocess.Popen([sys.executable, "-c", _WRITER, str(path), "1000000000"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(40):
        told = int(process.stdout.readline())
    assert ring.alive(path)
    process.send_signal(signal.SIGKILL)
    told = max([told, *map(int, process.stdout.read().split())])
    process.wait()
    assert not ring.alive(path)
    reader = ring.Reader(path)
    numbers = [number(f) for f in reader.read()]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) and numbers[-1] >= told - 1
    assert reader.missed == reader.damaged == 0 and not reader.closed


def test_a_reader_beside_a_fast_writer_sees_whole_frames(tmp_path: Path) -> None:
    """The writer laps the reader again and again: frames are whole and ascend, and those it lost are counted."""
    path = tmp_path / "a.ring"
    total = 60_000
    process = subprocess.Popen([sys.executable, "-c", _WRITER, str(path), str(total)], stdout=subprocess.DEVNULL)
    while not path.exists():
        time.sleep(0.001)
    reader = ring.Reader(path)
    numbers: list[int] = []
    while process.poll() is None or reader.pending:
        for f in reader.read():
            assert len(f) == len(b"%d " % number(f)) + number(f) % 700
            numbers.append(number(f))
        time.sleep(0.002)
    assert numbers == sorted(set(numbers)) and numbers[-1] == total - 1
    assert reader.damaged == 0 and len(numbers) + reader.missed == total


# -- the guard --------------------------------------------------------------------------------------------------------


def test_records_go_through(folder: Path) -> None:
    made = channel.Channel.open("api", {"config": {}})
    assert made is not None and made.on
    made.send({"k": "s", "t": 5, "x": [1, None, 2.5, "é"]}, 5)
    reader = ring.Reader(made.path)
    assert [channel.decoder(reader.header.encoding)(f) for f in reader.read()] == [{"k": "s", "t": 5, "x": [1, None, 2.5, "é"]}]
    assert reader.last_ns == 5 and folder.stat().st_mode & 0o777 == 0o700


def test_a_reader_switches_it_off_and_on(folder: Path) -> None:
    made = channel.Channel.open("api", {})
    assert made is not None
    ring.Reader.switch(made.path, off=True)
    assert not made.on
    ring.Reader.switch(made.path, off=False)
    assert made.on


def test_the_environment_turns_it_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPTRACE_VLLM", "0")
    assert channel.Channel.open("api", {}) is None and not folder.exists()


def test_a_full_disk_turns_it_off_with_one_warning(folder: Path) -> None:
    """A limit on file sizes refuses the room as a full disk does: nothing raises, one warning, no file is left."""
    code = """
        import logging, resource, sys
        logging.basicConfig(format="%(levelname)s %(message)s")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        from hoptrace.collectors.inside.channel import Channel
        assert Channel.open("api", {}) is None
        from hoptrace.collectors.inside.vllm_steps import StepRecorder
        r = StepRecorder.of(object())
        r.scheduled(None, None, 0, 0); r.updated(None, None, None, 0, 0); r.added(None, 0); r.finished([1], "x", 0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stderr.count("WARNING hoptrace records nothing here") == 1 and "File too large" in done.stderr
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_none_turns_it_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.joinpath("file").write_text("")
    monkeypatch.setenv("HOPTRACE_CHANNELS", str(folder.parent / "file" / "channels"))
    with caplog.at_level(logging.WARNING, "vllm.hoptrace"):
        assert channel.Channel.open("api", {}) is None
    assert len(caplog.records) == 1


def test_links_and_folders_of_others_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "real").mkdir()
    folder.symlink_to(folder.parent / "real")
    assert channel.Channel.open("api", {}) is None
    folder.unlink()
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    os.chown(folder, 54321, -1) if os.getuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert channel.Channel.open("api", {}) is None
    assert list(folder.iterdir()) == []


def test_faults_are_counted_and_many_turn_it_off(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = channel.Channel.open("api", {})
    assert made is not None
    reader = ring.Reader(made.path)
    with caplog.at_level(logging.WARNING, "vllm.hoptrace"):
        for _ in range(99):
            made.fault(ValueError("x"))
        assert made.on
        made.fault(ValueError("x"))
    assert not made.on and reader.lost == 100
    assert [r.getMessage() for r in caplog.records][-1].startswith("hoptrace turns itself off after 100 faults")
    made.fault(ValueError("x"))
    made.send({}, 1)


def test_a_forked_child_does_not_write(folder: Path) -> None:
    made = channel.Channel.open("api", {})
    assert made is not None
    code = f"""
        import os
        os.environ["HOPTRACE_CHANNELS"] = {str(folder)!r}
        from hoptrace.collectors.inside.channel import Channel
        made = Channel.open("api", {{}})
        pid = os.fork()
        if pid == 0:
            made.fault(ValueError())
            os._exit(0 if not made.on else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert made.on
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_channels_of_the_dead_stay_a_day_and_are_bounded(folder: Path) -> None:
    code = f"""
        import time
        from pathlib import Path
        from hoptrace.collectors.inside import ring
        Path({str(folder)!r}).mkdir(exist_ok=True)
        for i in range({channel.DEAD_KEPT} + 4):
            ring.Writer(Path({str(folder)!r}) / f"{{i}}.ring", 65536, ring.JSON, {{}}).put(b"x", time.monotonic_ns())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    mine = ring.Writer(folder / "mine.ring", SMALL, ring.JSON, {})
    (folder / "foreign.txt").write_text("")
    assert channel.remove_old(folder) == 4
    # Unused for two days, but its writer lives: it stays.
    two_days = time.time() + 2 * 86400
    assert channel.remove_old(folder, now=time.time() + 3600) == 0
    for file in folder.glob("*.ring"):
        os.utime(file, (1, 1))
    assert channel.remove_old(folder) == 0, "a mapped file's own time may stand still: the last frame counts"
    with pytest.MonkeyPatch.context() as patch:
        now = time.monotonic_ns() + 2 * 86400 * 10**9
        patch.setattr(time, "monotonic_ns", lambda: now)
        assert channel.remove_old(folder, now=two_days) == channel.DEAD_KEPT
    assert sorted(p.name for p in folder.iterdir()) == ["foreign.txt", "mine.ring"]
    mine.close()


def test_nothing_heavy_is_loaded_inside_the_engine() -> None:
    """What runs in vLLM's processes loads the standard library only (msgspec once a channel is opened)."""
    code = """
        import sys
        before = set(sys.modules)
        from hoptrace.collectors.inside import channel, ring, vllm_config, vllm_record, vllm_steps, vllm_times
        new = {m.split(".")[0] for m in set(sys.modules) - before}
        print(*sorted(new - sys.stdlib_module_names - {"hoptrace"}))
        print(*sorted(m for m in sys.modules if m.startswith("hoptrace")))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    foreign, ours = done.stdout.splitlines()
    assert foreign == ""
    inside = "hoptrace.collectors.inside"
    names = ("", ".channel", ".ring", ".vllm_config", ".vllm_record", ".vllm_steps", ".vllm_times")
    assert ours.split() == ["hoptrace", "hoptrace.collectors", *(f"{inside}{n}" for n in names)]
