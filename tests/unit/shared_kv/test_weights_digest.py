"""The digest of a checkpoint: what it depends on, and when a note of it counts."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

from shmllm.formats.gguf_pieces import piece_name
from shmllm.shared_kv import weights_digest
from shmllm.shared_kv.weights_digest import (
    NOTE,
    compute_digest,
    digest_of_random,
    has_changed_since,
    known_digest,
)

CONTENTS = {
    "config.json": b'{"hidden_size": 8}',
    "model-00001-of-00002.safetensors": b"first shard",
    "model-00002-of-00002.safetensors": b"second shard",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "more-weights"}}
    ).encode(),
    "more-weights": b"a shard that only the index names",
}
OTHERS = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "generation_config.json": b"{}",
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"an adapter",
    "README.md": b"text",
}


PICKLES = {
    "pytorch_model.bin": b"pickled",
    "pytorch_model.bin.index.json": json.dumps({"weight_map": {"a": "more-pickles"}}).encode(),
    "more-pickles": b"a shard that only the index names",
}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, which is removed after the test and contains the user's cache directory."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_CACHE_HOME", f"{name}/cache")
        yield Path(name)


@pytest.fixture
def checkpoint(folder: Path) -> Path:
    return make(folder / "model", CONTENTS | OTHERS)


def make(directory: Path, contents: dict[str, bytes]) -> Path:
    directory.mkdir()
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return directory


def never() -> bool:
    return False


def digest_of(directory: Path) -> str:
    digest = compute_digest(directory, never)
    assert digest is not None
    return digest


def changed(path: Path, content: bytes) -> None:
    """Overwrite a file, a second later than it was written before."""
    before = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if not path.is_dir()}


def cached(folder: Path) -> list[Path]:
    """The notes in the cache directory."""
    return [*(folder / "cache" / "shmllm" / "digests").iterdir()]


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# what the digest depends on


def test_a_copy_has_the_same_digest(checkpoint: Path, folder: Path) -> None:
    digest = digest_of(checkpoint)
    assert len(bytes.fromhex(digest)) == 32
    assert digest_of(shutil.copytree(checkpoint, folder / "copy")) == digest


def test_links_are_followed(checkpoint: Path, folder: Path) -> None:
    snapshot = folder / "snapshot"
    snapshot.mkdir()
    for number, name in enumerate(CONTENTS):
        blob = folder / f"blob{number}"
        shutil.copy(checkpoint / name, blob)
        (snapshot / name).symlink_to(blob)
    (folder / "link").symlink_to(snapshot)
    digest = digest_of(checkpoint)
    assert digest_of(snapshot) == digest
    assert known_digest(folder / "link") == digest
    changed(folder / "blob1", b"first Shard")
    assert known_digest(folder / "link") is None


def test_the_order_of_names_has_no_influence(checkpoint: Path, folder: Path) -> None:
    reverse = make(folder / "reverse", dict(reversed((CONTENTS | OTHERS).items())))
    assert digest_of(reverse) == digest_of(checkpoint)


def test_the_digest_of_a_version_stays_the_same(folder: Path) -> None:
    contents = {"config.json": b"{}", "model.safetensors": b"weights"}
    digest = "804b26f7bbcd724a92aca6ca62dbd91b015e627711954bd0207cb02f8c5cd1d7"
    assert digest_of(make(folder / "model", contents)) == digest


@pytest.mark.parametrize("name", CONTENTS)
def test_a_flipped_byte_in_any_file_changes_the_digest(
    name: str, checkpoint: Path, folder: Path
) -> None:
    other = shutil.copytree(checkpoint, folder / "other")
    content = bytearray(CONTENTS[name])
    content[0 if name == "more-weights" else -3] ^= 1
    (other / name).write_bytes(content)
    assert digest_of(other) != digest_of(checkpoint)


def test_other_files_have_no_influence(checkpoint: Path, folder: Path) -> None:
    assert digest_of(make(folder / "bare", CONTENTS)) == digest_of(checkpoint)
    for name in OTHERS:
        changed(checkpoint / name, b"something else")
    assert known_digest(checkpoint) is not None


@pytest.mark.parametrize(
    "contents",
    [
        {"a.safetensors": b"12", "c.safetensors": b"34"},
        {"a.safetensors": b"123", "b.safetensors": b"4"},
        {"a.safetensors": b"34", "b.safetensors": b"12"},
        {"a.safetensors": b"1234", "b.safetensors": b""},
        {"a.safetensors": b"1234"},
    ],
)
def test_names_and_places_of_bytes_change_the_digest(
    contents: dict[str, bytes], folder: Path
) -> None:
    first = make(folder / "first", {"a.safetensors": b"12", "b.safetensors": b"34"})
    assert digest_of(make(folder / "second", contents)) != digest_of(first)


def test_a_further_config_and_further_weights_change_the_digest(checkpoint: Path) -> None:
    digests = [digest_of(checkpoint)]
    for name in ("config.5.0.0.json", "consolidated.safetensors", "model.gguf"):
        (checkpoint / name).write_bytes(b"{}")
        assert known_digest(checkpoint) is None
        digests.append(digest_of(checkpoint))
    assert len(set(digests)) == 4


def test_adapters_for_tasks_belong_to_the_weights(checkpoint: Path) -> None:
    digests = [digest_of(checkpoint)]
    adapter = checkpoint / "adapters" / "retrieval"
    adapter.mkdir(parents=True)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (adapter / name).write_bytes(OTHERS[name])
        assert known_digest(checkpoint) is None
        digests.append(digest_of(checkpoint))
    assert len({*digests}) == 3
    changed(adapter / "adapter_model.safetensors", b"another one")
    assert known_digest(checkpoint) is None


@pytest.mark.parametrize("index", [b"", b"[" * 10**5, b"[]", b'{"weight_map": [1]}', b"\xff"])
def test_a_damaged_index_lists_nothing(index: bytes, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_bytes(index)
    digest = digest_of(checkpoint)
    changed(checkpoint / "more-weights", b"more")
    assert known_digest(checkpoint) == digest


def test_an_index_reaches_no_other_directory(checkpoint: Path) -> None:
    names = {"a": "../secret", "b": "/etc/passwd", "c": "..", "d": "", "e": "a\0b", "f": 1}
    index = json.dumps({"weight_map": names})
    (checkpoint / "model.safetensors.index.json").write_text(index)
    digest_of(checkpoint)
    files = json.loads((checkpoint / NOTE).read_text())["content"]["files"]
    assert files.keys() == CONTENTS.keys() - {"more-weights"}


def test_files_of_several_buffers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(folder / "model", {"model.safetensors": bytes(range(256))})
    digest = digest_of(model)
    monkeypatch.setattr(weights_digest, "_BUFFER_BYTES", 100)
    assert digest_of(model) == digest


def test_random_weights(folder: Path) -> None:
    text = '{"hidden_size": 8}'
    digests = {digest_of_random(text, seed) for seed in (0, 1, 2**63 - 1)}
    digests |= {digest_of_random(f"0{text}", 1), digest_of_random(text, 10)}
    digests.add(digest_of(make(folder / "model", {"config.json": text.encode(), "a.gguf": b""})))
    assert len(digests) == 6
    assert digest_of_random(text, 7) == digest_of_random(text, 7)


# GGUF


def test_one_gguf_file(folder: Path) -> None:
    path = folder / "weights.gguf"
    path.write_bytes(b"GGUF")
    digest = digest_of(path)
    assert known_digest(path) == digest
    assert digest_of(shutil.copy(path, folder / "copy.gguf")) == digest
    (folder / "link").symlink_to(path)
    assert digest_of(folder / "link") == digest
    changed(path, b"GGUf")
    assert known_digest(path) is None
    assert digest_of(path) != digest


def test_the_model_directory_of_a_gguf_file(folder: Path) -> None:
    (folder / "weights.gguf").write_bytes(b"GGUF")
    model = make(folder / "model", {"config.json": b"{}", "gguf_source.json": b"{}"})
    (model / "model.gguf").symlink_to(folder / "weights.gguf")
    digest = digest_of(model)
    changed(model / "gguf_source.json", b"[]")
    assert known_digest(model) == digest
    changed(folder / "weights.gguf", b"GGUf")
    assert known_digest(model) is None


def test_all_pieces_behind_a_link_or_a_path_belong_to_it(folder: Path) -> None:
    pieces = [folder / piece_name("big", number, 3) for number in (1, 2, 3)]
    for piece in pieces:
        piece.write_bytes(b"GGUF")
    model = make(folder / "model", {"config.json": b"{}"})
    (model / "model.gguf").symlink_to(pieces[0])
    before = digest_of(model), digest_of(pieces[0])
    assert digest_of(pieces[2]) == before[1]
    changed(pieces[2], b"GGUf")
    assert known_digest(model) is None
    assert known_digest(pieces[0]) is None
    assert not {digest_of(model), digest_of(pieces[0])} & {*before}
    pieces[1].unlink()
    assert known_digest(model) is None
    assert compute_digest(model, never) is None


# what is known


def test_a_digest_is_known_once_it_was_computed(checkpoint: Path, folder: Path) -> None:
    assert known_digest(checkpoint) is None
    digest = digest_of(checkpoint)
    assert known_digest(checkpoint) == digest
    assert files_in(folder) == {*CONTENTS, *OTHERS, NOTE}


def test_the_note_moves_with_the_directory(checkpoint: Path, folder: Path) -> None:
    digest = digest_of(checkpoint)
    assert known_digest(checkpoint.rename(folder / "moved")) == digest


def test_everybody_may_read_the_note_and_only_its_owner_may_write_it(checkpoint: Path) -> None:
    before = os.umask(0)
    try:
        digest_of(checkpoint)
    finally:
        os.umask(before)
    assert stat.S_IMODE((checkpoint / NOTE).stat().st_mode) == 0o644


@pytest.mark.parametrize("name", CONTENTS)
def test_a_changed_file_of_the_same_size_is_noticed(name: str, checkpoint: Path) -> None:
    digest_of(checkpoint)
    changed(checkpoint / name, CONTENTS[name])
    assert known_digest(checkpoint) is None


def test_a_replaced_file_with_the_same_time_is_noticed(checkpoint: Path, folder: Path) -> None:
    path = checkpoint / "model-00001-of-00002.safetensors"
    digest_of(checkpoint)
    other = shutil.copy2(path, folder / "other")
    assert other.stat().st_mtime_ns == path.stat().st_mtime_ns
    other.rename(path)
    assert known_digest(checkpoint) is None


@pytest.mark.parametrize("name", CONTENTS)
def test_a_removed_file_is_noticed(name: str, checkpoint: Path) -> None:
    digest_of(checkpoint)
    (checkpoint / name).unlink()
    assert known_digest(checkpoint) is None


def test_a_note_of_changed_files_is_replaced(checkpoint: Path) -> None:
    before = digest_of(checkpoint)
    changed(checkpoint / "config.json", b"{}")
    after = digest_of(checkpoint)
    assert after != before
    assert known_digest(checkpoint) == after


def damaged(text: str) -> dict[str, bytes]:
    note = json.loads(text)
    digest = note["content"]["digest"]
    return {
        "empty": b"",
        "cut": text[:-20].encode(),
        "zeros": bytes(len(text)),
        "other digest": text.replace(digest, digest[::-1]).encode(),
        "no object": b"[]",
        "no fields": b"{}",
        "no content": b'{"checksum": "", "content": null}',
        "too deep": b"[" * 10**5,
        "not UTF-8": b"\xff\xfe",
        "other version": text.replace('"version": 1', '"version": 2').encode(),
    }


KINDS = [*damaged('{"content": {"digest": "0"}}')]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_note_counts_as_absent(kind: str, checkpoint: Path) -> None:
    digest = digest_of(checkpoint)
    note = checkpoint / NOTE
    text = note.read_text()
    note.write_bytes(damaged(text)[kind])
    assert known_digest(checkpoint) is None
    assert digest_of(checkpoint) == digest
    assert note.read_text() == text


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {"version": 1},
        {"version": 1, "files": [], "digest": "0"},
        {"version": 1, "files": {}, "digest": "0"},
        {"version": 1, "files": dict.fromkeys(CONTENTS), "digest": "0"},
        {"version": 1, "files": {name: [1, 2, 3] for name in [*CONTENTS, "../x", "a\0b"]}},
    ],
)
def test_a_note_with_a_right_checksum_and_wrong_fields_counts_as_absent(
    content: dict[str, object], checkpoint: Path
) -> None:
    note = {"checksum": weights_digest._checksum(content), "content": content}
    (checkpoint / NOTE).write_text(json.dumps(note))
    assert known_digest(checkpoint) is None


def test_a_note_that_others_may_write_counts_as_absent(checkpoint: Path) -> None:
    digest_of(checkpoint)
    (checkpoint / NOTE).chmod(0o666)
    assert known_digest(checkpoint) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_only_the_user_root_and_the_owner_of_the_directory_write_notes(checkpoint: Path) -> None:
    digest = digest_of(checkpoint)
    os.chown(checkpoint / NOTE, 65534, -1)
    assert known_digest(checkpoint) is None
    os.chown(checkpoint, 65534, -1)
    assert known_digest(checkpoint) == digest


def test_a_pipe_in_place_of_a_note_or_of_weights_is_passed_over(checkpoint: Path) -> None:
    os.mkfifo(checkpoint / NOTE)
    os.mkfifo(checkpoint / "more.safetensors")
    assert known_digest(checkpoint) is None
    digest = digest_of(checkpoint)
    (checkpoint / "more.safetensors").unlink()
    assert known_digest(checkpoint) == digest


@pytest.mark.parametrize("name", ["absent", "a\0b", "n" * 300, "model/config.json/more"])
def test_no_path_raises_an_error(name: str, checkpoint: Path, folder: Path) -> None:
    assert known_digest(folder / name) is None
    assert compute_digest(folder / name, never) is None


def test_a_directory_without_weights_has_no_digest(folder: Path) -> None:
    model = make(folder / "model", {"config.json": b"{}"} | OTHERS)
    (model / "model.safetensors").symlink_to("gone")
    assert compute_digest(model, never) is None
    assert NOTE not in files_in(folder)


# where notes lie


def test_the_note_lies_in_the_cache_if_none_can_lie_beside(checkpoint: Path, folder: Path) -> None:
    (checkpoint / NOTE).mkdir()  # no file can be renamed to a directory
    digest = digest_of(checkpoint)
    assert known_digest(checkpoint) == digest
    assert [path.suffix for path in cached(folder)] == [".json"]
    assert files_in(checkpoint) == {*CONTENTS, *OTHERS}
    (folder / "link").symlink_to(checkpoint)
    assert known_digest(folder / "link") == digest
    changed(checkpoint / "config.json", b"{}")
    assert known_digest(checkpoint) is None
    assert known_digest(shutil.copytree(checkpoint, folder / "copy")) is None


def test_a_read_only_directory(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_file = tempfile.mkstemp

    def refuse(prefix: str, dir: str) -> tuple[int, str]:
        if Path(dir) == checkpoint:
            raise PermissionError(13, "Permission denied")
        return make_file(prefix=prefix, dir=dir)

    if os.geteuid() == 0:  # which may write everywhere
        monkeypatch.setattr(tempfile, "mkstemp", refuse)
    checkpoint.chmod(0o555)
    try:
        digest = digest_of(checkpoint)
    finally:
        checkpoint.chmod(0o755)
    assert known_digest(checkpoint) == digest
    assert len(cached(folder)) == 1


def test_an_old_note_beside_does_not_hide_the_one_in_the_cache(
    checkpoint: Path, folder: Path
) -> None:
    digest_of(checkpoint)
    old = (checkpoint / NOTE).read_bytes()
    (checkpoint / NOTE).unlink()
    (checkpoint / NOTE).mkdir()
    changed(checkpoint / "config.json", b"{}")
    digest = digest_of(checkpoint)
    (checkpoint / NOTE).rmdir()
    (checkpoint / NOTE).write_bytes(old)
    assert known_digest(checkpoint) == digest


@pytest.mark.parametrize("cache", ["cache/file", "relative", ""])
def test_nothing_can_be_kept(
    cache: str, checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / cache) if "/" in cache else cache)
    monkeypatch.setenv("HOME", str(folder / "cache" / "file"))
    (folder / "cache").mkdir()
    (folder / "cache" / "file").touch()
    (checkpoint / NOTE).mkdir()
    assert len(digest_of(checkpoint)) == 64
    assert known_digest(checkpoint) is None
    assert files_in(folder) == {*CONTENTS, *OTHERS, "file"}
    assert not Path("relative").exists()


def test_a_full_disk_is_harmless(checkpoint: Path, folder: Path) -> None:
    with full_disk():
        digest = digest_of(checkpoint)
    assert files_in(folder) == {*CONTENTS, *OTHERS}
    assert known_digest(checkpoint) is None
    assert digest_of(checkpoint) == digest


def test_a_full_disk_leaves_the_note_that_exists(checkpoint: Path) -> None:
    digest = digest_of(checkpoint)
    with full_disk():
        assert digest_of(checkpoint) == digest
    assert known_digest(checkpoint) == digest


# while it is computed


@pytest.mark.parametrize("calls", [0, 1, 4, 9])
def test_it_stops_between_buffers(calls: int, checkpoint: Path, folder: Path) -> None:
    left = iter([False] * calls)
    assert compute_digest(checkpoint, lambda: next(left, True)) is None
    assert next(left, None) is None, "it was asked as often as it allowed to go on"
    assert files_in(folder) == {*CONTENTS, *OTHERS}


def test_it_asks_before_each_buffer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_digest, "_BUFFER_BYTES", 10)
    model = make(folder / "model", {"model.safetensors": bytes(100)})
    asked = iter(range(100))
    compute_digest(model, lambda: next(asked) < 0)
    assert next(asked) == 11  # the last one finds the end of the file


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("call", [0, 9])
def test_a_file_that_changes_meanwhile_gives_nothing(
    name: str, call: int, checkpoint: Path, folder: Path
) -> None:
    calls = iter(range(100))

    def change() -> bool:
        if next(calls) == call:
            changed(checkpoint / name, CONTENTS[name])
        return False

    assert compute_digest(checkpoint, change) is None
    assert files_in(folder) == {*CONTENTS, *OTHERS}


def test_another_file_in_its_place_for_a_while_gives_nothing(
    checkpoint: Path, folder: Path
) -> None:
    path, aside = checkpoint / "model-00001-of-00002.safetensors", folder / "aside"
    calls = iter(range(100))

    def exchange() -> bool:
        call = next(calls)
        if call == 0:
            path.rename(aside)
            path.write_bytes(b"first Shard")
        elif call == 5:
            aside.replace(path)
        return False

    assert compute_digest(checkpoint, exchange) is None


@pytest.mark.parametrize("name", ["more.safetensors", "config.5.0.0.json"])
def test_a_file_that_appears_meanwhile_gives_nothing(name: str, checkpoint: Path) -> None:
    assert compute_digest(checkpoint, lambda: bool((checkpoint / name).write_bytes(b""))) is None
    assert not (checkpoint / NOTE).exists()


def test_a_file_that_vanishes_meanwhile_gives_nothing(checkpoint: Path) -> None:
    last = checkpoint / "more-weights"

    def remove() -> bool:
        last.unlink(missing_ok=True)
        return False

    assert compute_digest(checkpoint, remove) is None


@pytest.mark.process
def test_two_processes_at_once(checkpoint: Path, folder: Path) -> None:
    source = (
        "import sys; from pathlib import Path\n"
        "from shmllm.shared_kv.weights_digest import compute_digest, known_digest\n"
        "sys.stdin.read()\n"
        "found = set()\n"
        "for _ in range(50):\n"
        "    found |= {compute_digest(Path(sys.argv[1]), lambda: False)}\n"
        "    found |= {known_digest(Path(sys.argv[1]))}\n"
        "print(*found)\n"
    )
    command = [sys.executable, "-c", source, str(checkpoint)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        outputs = [process.communicate(timeout=PATIENCE_S)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert outputs == [[known_digest(checkpoint)]] * 2
    assert files_in(folder) == {*CONTENTS, *OTHERS, NOTE}


def test_a_checkpoint_that_is_written_again_has_changed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    moment = max(each.stat().st_ctime for each in tmp_path.iterdir())
    assert not has_changed_since(tmp_path, moment)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not has_changed_since(tmp_path, moment)
    time.sleep(0.02)  # longer than a tick of the file system's clock
    (tmp_path / "model.safetensors").write_bytes(b"y")
    assert has_changed_since(tmp_path, moment)
    assert has_changed_since(tmp_path / "absent", moment)


def test_pickles_count_if_there_are_no_other_weights(folder: Path) -> None:
    config = {"config.json": CONTENTS["config.json"]}
    digests = {digest_of(make(folder / "whole", config | PICKLES))}
    for name in PICKLES:
        other = config | PICKLES | {name: PICKLES[name] + b" "}
        digests.add(digest_of(make(folder / name, other)))
    digests.add(digest_of(make(folder / "one", config | {"pytorch_model.bin": b"pickled"})))
    assert len(digests) == 5
    beside = make(folder / "beside", CONTENTS | PICKLES)
    assert digest_of(beside) == digest_of(make(folder / "without", CONTENTS))


@pytest.mark.parametrize("name", ["heads.safetensors", "model-q4.gguf"])
def test_pickles_count_beside_weights_that_the_loader_reads_after_them(
    name: str, folder: Path
) -> None:
    others = {"config.json": CONTENTS["config.json"], name: b"others"}
    digests = {
        digest_of(make(folder / weights.decode(), others | {"pytorch_model.bin": weights}))
        for weights in (b"some", b"other")
    }
    assert len(digests) == 2
