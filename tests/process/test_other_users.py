"""Another user of the machine can neither take, end, block nor read a name, a segment or a log.

The other user is nobody, in processes of its own. A directory with the sticky bit stands for
/dev/shm and for the temporary directory.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.engines import named_engine
from support.other_user import (
    UID,
    run_as_other,
    shared_directory,
    start_as_other,
    why_impossible,
)
from support.programs import environment, kill, read_line
from support.waiting import PATIENCE_S

from shmllm import LLM, SamplingParams
from shmllm.cli.engine_log import LARGEST_BYTES, open_log
from shmllm.cli.ipc import ipc
from shmllm.errors import SegmentError
from shmllm.ipc import folder, registry
from shmllm.ipc.segment import Segment
from shmllm.ipc.states import SegmentKind

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("no_leaks", "another_user")]

WHAT = "engine 'e'"
NAME = f"other-{os.getpid()}"
NUM_FOLDERS = 200

# Puts something of a kind under a path, for each pair in the arguments; prints how many it put.
PLACE = """
def place(kind, path):
    if kind == "file":
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
    elif kind == "pipe":
        os.mkfifo(path, 0o666)
    elif kind == "directory":
        os.mkdir(path, 0o777)
    elif kind == "closed directory":
        os.mkdir(path, 0o700)
    elif kind == "link":
        os.symlink("/etc", path)
    elif kind == "link to ours":
        os.symlink(os.path.join(os.path.dirname(path), "ours"), path)
placed = 0
for kind, path in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    try:
        place(kind, path)
        placed += 1
    except OSError:
        pass
print(placed)
"""
KINDS = ("file", "pipe", "directory", "closed directory", "link", "link to ours")

# Tries to take a name whenever it is free.
TAKE = """
print("began", flush=True)
taken, parent = 0, os.getppid()
while os.getppid() == parent and not os.path.exists(sys.argv[2]):
    try:
        os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
        taken += 1
    except OSError:
        pass
print(taken, flush=True)
"""

# The beginning of the programs that try much and collect what succeeds.
ATTEMPT = """
gained = set()
def attempt(what, function, *arguments):
    try:
        function(*arguments)
        gained.add(what)
    except OSError:
        pass
def lock(path):
    fd = os.open(path, os.O_RDWR)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 2, 0))
"""

# Tries each way to reach files; prints the successful ones.
REACH = (
    ATTEMPT
    + """
libc = ctypes.CDLL(None, use_errno=True)
def link(path):
    if libc.linkat(-100, path.encode(), -100, (path + "-linked").encode(), 0):
        raise OSError(ctypes.get_errno(), "linkat")
for path in sys.argv[1:]:
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        attempt(f"open {path} {flags}", os.open, path, flags)
    attempt(f"lock {path}", lock, path)
    attempt(f"link {path}", link, path)
    attempt(f"list {path}", os.listdir, path)
    attempt(f"chmod {path}", os.chmod, path, 0o777)
    attempt(f"unlink {path}", os.unlink, path)
    attempt(f"rmdir {path}", os.rmdir, path)
    attempt(f"rename {path}", os.rename, path, path + "-moved")
    attempt(f"create in {path}", os.mkdir, os.path.join(path, "x"))
print(json.dumps(sorted(gained)))
"""
)


@pytest.fixture(scope="session")
def another_user() -> None:
    """Skips where this user cannot run programs as another one."""
    if (reason := why_impossible()) is not None:
        pytest.skip(reason)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that stands for /dev/shm and for the temporary directory."""
    with shared_directory() as root:
        monkeypatch.setattr(registry, "SHM_DIRECTORY", root)
        monkeypatch.setattr(tempfile, "tempdir", str(root))
        yield root


@contextmanager
def owned(kind: SegmentKind) -> Iterator[Segment]:
    with Segment.create(kind) as segment:
        segment.take_ownership()
        yield segment


@contextmanager
def named(name: str = NAME) -> Iterator[tuple[Segment, Path]]:
    """A live control segment under a name."""
    with owned(SegmentKind.CONTROL) as segment:
        path = registry.control_path(name)
        assert registry.publish(segment, path)
        yield segment, path
        registry.withdraw(segment, path)


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_else_can_put_anything_under_a_name(root: Path, kind: str) -> None:
    control = registry.control_path(NAME)
    assert not run_as_other(PLACE, kind, control)
    assert not run_as_other(PLACE, kind, registry.client_path(NAME, 0))
    with named() as (_, path), owned(SegmentKind.CLIENT) as client:
        assert path == control
        assert registry.claim_place(client, NAME) == 0
        registry.attach(path, SegmentKind.CONTROL, WHAT).close()
        registry.withdraw(client, registry.client_path(NAME, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_whose_name_is_taken_is_made_under_another(root: Path, kind: str) -> None:
    (root / "ours").mkdir(0o755)  # what a link may lead to
    taken = folder.first_path(root)
    assert run_as_other(PLACE, kind, taken)
    with named() as (_, path):
        status = path.parent.lstat()
        assert path.parent.parent == root
        assert path.parent not in (taken, root / "ours")
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o700)
        assert [entry.path for entry in registry.names()] == [path]
        assert registry.control_path(NAME) == path
        with owned(SegmentKind.CONTROL) as late:
            assert not registry.publish(late, registry.control_path(NAME))
    assert os.lstat(taken).st_uid == UID
    assert stat.S_IMODE((root / "ours").stat().st_mode) == 0o755
    log, file = open_log(NAME)
    file.close()
    assert log.parent == path.parent


def test_a_name_stays_when_the_other_user_gives_the_folder_back(root: Path) -> None:
    taken = folder.first_path(root)
    assert run_as_other(PLACE, "directory", taken)
    with named() as (control, path), owned(SegmentKind.CLIENT) as client:
        taken.rmdir()
        with named("second") as (_, second):
            assert second.parent == path.parent
        taken.mkdir(0o700)  # a process that looked before the first engine started makes it now
        assert registry.control_path(NAME) == path
        assert registry.claim_place(client, NAME) == 0
        assert [entry.path.parent for entry in registry.names()] == [path.parent] * 2
        with owned(SegmentKind.CONTROL) as late:
            assert not registry.publish(late, taken / NAME)
        with registry.attach(registry.control_path(NAME), SegmentKind.CONTROL, WHAT) as attached:
            assert attached.nonce == control.nonce


def test_nobody_else_gets_a_name_in_the_moment_when_it_is_free(root: Path) -> None:
    path, over = registry.control_path(NAME), root / "over"
    client_path = registry.client_path(NAME, 0)
    attackers = [start_as_other(TAKE, each, over) for each in (path, client_path)]
    try:
        for attacker in attackers:
            assert read_line(attacker) == "began\n"
        for turn in range(60):
            with owned(SegmentKind.CONTROL) as control, owned(SegmentKind.CLIENT) as client:
                assert registry.publish(control, path)
                assert registry.claim_place(client, NAME) == 0
                if turn % 2:
                    registry.withdraw(control, path)
                    registry.withdraw(client, client_path)
            assert registry.sweep(path)
            assert registry.sweep(client_path)
        over.touch()
        assert [attacker.communicate(timeout=PATIENCE_S)[0] for attacker in attackers] == [
            "0\n"
        ] * 2
    finally:
        for attacker in attackers:
            kill(attacker)


def test_nobody_else_reaches_a_file_or_the_folder(root: Path) -> None:
    log, file = open_log(NAME)
    with file, named() as (control, path), owned(SegmentKind.CLIENT) as client:
        place = registry.claim_place(client, NAME)
        client_path = registry.client_path(NAME, place)
        paths = [path.parent, path, client_path, log]
        paths += [Path(f"/proc/{os.getpid()}/fd/{each.fd}") for each in (control, client)]
        assert run_as_other(REACH, *paths) == []
        assert sorted(path.parent.iterdir()) == [path, client_path, log]
        registry.withdraw(client, client_path)


def test_nobody_else_reaches_a_named_semaphore() -> None:
    posix_ipc = pytest.importorskip("posix_ipc")
    from shmllm.ipc.doorbell import NamedDoorbell

    name = f"/shmllm-{os.urandom(16).hex()}"
    NamedDoorbell.make(name)
    try:
        assert run_as_other(REACH, f"/dev/shm/sem.{name[1:]}") == []
    finally:
        posix_ipc.unlink_semaphore(name)


def test_a_folder_that_others_could_use_for_a_while_is_closed_again(root: Path) -> None:
    """What others put there meanwhile is refused, skipped and never waited for."""
    mine = folder.make(root)
    mine.chmod(0o777)
    pairs = [(kind, mine / kind) for kind in KINDS[:3]]
    assert run_as_other(PLACE, *itertools.chain(*pairs)) == 3
    locker = start_as_other(
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "lock = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 1, 1, 0)\n"
        "fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.close(); os.read(os.open(sys.argv[2], os.O_RDWR), 1)",
        mine / "file",
        mine / "pipe",
    )
    try:
        assert read_line(locker) == "locked\n"
        odd = [registry.control_path(name) for name in ("directory", "file", "pipe")]
        assert stat.S_IMODE(mine.stat().st_mode) == 0o700
        assert run_as_other(PLACE, "file", mine / "late") == 0
        with owned(SegmentKind.CONTROL) as dead:
            assert registry.publish(dead, mine / "zdead")
        with owned(SegmentKind.CONTROL) as control:
            for path in odd:
                assert not registry.sweep(path)
                assert not registry.publish(control, path)
                with pytest.raises(SegmentError, match="is no segment of this user"):
                    registry.attach(path, SegmentKind.CONTROL, WHAT)
        result = CliRunner().invoke(ipc, ["gc", "--yes"])
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert [line.split()[1] for line in lines] == [*map(str, odd), str(mine / "zdead")]
        assert [line.split()[0] for line in lines] == ["kept"] * 3 + ["removed"]
        assert "mode is -rw-rw-rw-" in lines[1]
        assert CliRunner().invoke(ipc, ["ls"]).output.count("unreadable") == 3
    finally:
        kill(locker)


def test_files_that_another_user_puts_into_dev_shm_are_not_looked_at(root: Path) -> None:
    names = zip(KINDS, (NAME, *(f"{NAME}.{place}" for place in range(len(KINDS) - 1))), strict=True)
    prefixes = ("", "shmllm.", "shmllm-")
    pairs = [(kind, root / f"{prefix}{name}") for kind, name in names for prefix in prefixes]
    assert run_as_other(PLACE, *itertools.chain(*pairs)) == len(pairs)
    with named() as (_, path), owned(SegmentKind.CLIENT) as client:
        assert [entry.path for entry in registry.names()] == [path]
        assert registry.claim_place(client, NAME) == 0
    assert CliRunner().invoke(ipc, ["gc"]).exit_code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_never_leads_to_another_file(root: Path, kind: str) -> None:
    taken = (root / f"shmllm-{NAME}.log", folder.first_path(root))
    assert run_as_other(PLACE, kind, taken[0], kind, taken[1]) == 2
    victim = root / "ours"
    victim.write_text("precious")
    path, file = open_log(NAME)
    with file:
        file.write(b"line\n")
    assert path.read_text() == "line\n"
    assert path.stat().st_uid == os.geteuid()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert victim.read_text() == "precious"


def test_a_log_is_appended_to_until_it_is_too_large(root: Path) -> None:
    for text in ("first\n", "second\n"):
        path, file = open_log(NAME)
        with file:
            file.write(text.encode())
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)
    assert path.read_text() == "first\nsecond\n"
    os.truncate(path, LARGEST_BYTES + 1)
    open_log(NAME)[1].close()
    assert path.stat().st_size == 0
    path.unlink()
    path.symlink_to(root / "elsewhere")
    with pytest.raises(SegmentError, match="cannot open the log"):
        open_log(NAME)
    assert not (root / "elsewhere").exists()


MAKE_FOLDERS = """
import sys
from pathlib import Path
from shmllm.ipc import folder
for index in range(int(sys.argv[2])):
    print(folder.make(Path(sys.argv[1], str(index))))
"""


def test_processes_that_make_the_folder_at_once_get_the_same(root: Path) -> None:
    for index in range(NUM_FOLDERS):
        (root / str(index)).mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE_FOLDERS, str(root), str(NUM_FOLDERS)],
            stdout=subprocess.PIPE,
            env=environment(),
        )
        for _ in range(3)
    ]
    outputs = {process.communicate(timeout=PATIENCE_S)[0].decode() for process in processes}
    expected = [str(folder.first_path(root / str(index))) for index in range(NUM_FOLDERS)]
    assert [output.split() for output in outputs] == [expected]


# Does what it can to the engine's files and names, until it is told to end.
ATTACK = (
    ATTEMPT
    + """
root, mine, name, over = sys.argv[1:]
print("began", flush=True)
turn, parent = 0, os.getppid()
while not os.path.exists(over) and os.getppid() == parent:
    turn += 1
    for entry in (name, *(f"{name}.{place}" for place in range(32))):
        path = os.path.join(mine, entry)
        attempt("made", os.mkdir, path)
        attempt("locked", lock, path)
        attempt("removed", os.unlink, path)
        attempt("renamed", os.rename, path, os.path.join(root, "moved"))
    attempt("renamed folder", os.rename, mine, os.path.join(root, f"moved{turn}"))
    attempt("removed folder", os.rmdir, mine)
    if turn < 50:
        attempt("", os.mkfifo, f"{mine}.{turn:016x}", 0o666)
print(json.dumps(sorted(gained - {""})))
"""
)


def test_an_engine_serves_beside_another_user_who_tries_everything(
    root: Path, tmp_path: Path
) -> None:
    preface = (
        "from pathlib import Path\nfrom shmllm.ipc import registry\n"
        f"registry.SHM_DIRECTORY = Path({str(root)!r})"
    )
    taken, over = folder.first_path(root), root / "over"
    assert run_as_other(PLACE, "directory", taken)
    mine = folder.make(root)
    with named_engine(tmp_path, preface) as (name, _):
        attacker = start_as_other(ATTACK, root, mine, name, over)
        try:
            assert read_line(attacker) == "began\n"
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            for _ in range(3):
                with LLM.attach(name) as llm:
                    output = llm.generate("import os\n", params, use_tqdm=False)[0].outputs[0]
                    assert len(output.token_ids) == 8
            assert [entry.engine for entry in registry.names()] == [name]
            over.touch()
            out, _ = attacker.communicate(timeout=PATIENCE_S)
            assert json.loads(out) == []
        finally:
            kill(attacker)
    assert list(mine.iterdir()) == []
