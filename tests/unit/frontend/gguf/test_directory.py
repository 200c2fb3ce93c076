"""The model directory of a GGUF file: made once, complete or not there at all."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gguf_models import write_model
from support.model_helpers import reference_model
from support.programs import result_of, run_source

from shmllm.errors import EngineStartError
from shmllm.frontend.gguf import directory as module
from shmllm.frontend.gguf.directory import model_directory
from shmllm.frontend.text.tokenizer import Tokenizer
from shmllm.models.config import ModelConfig

FILES = {
    "config.json",
    "generation_config.json",  # the bundled vocabulary has another token that ends a turn
    "gguf_source.json",
    "model.gguf",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The content of a file."""
    path = tmp_path_factory.mktemp("written") / "m.gguf"
    return write_model(path, reference_model("llama", num_hidden_layers=1)).read_bytes()


@pytest.fixture
def file(written: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "My model.Q4_1.gguf"
    path.write_bytes(written)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache, and a folder for temporary files, both not yet used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache" / "shmllm" / "models"


def test_a_directory_has_what_a_model_directory_has(file: Path, cache: Path) -> None:
    made = model_directory(file)
    assert made.parent == cache
    assert made.name.startswith("My_model.Q4_1-")
    assert {path.name for path in made.iterdir()} == FILES
    assert (made / "model.gguf").samefile(file)
    assert ModelConfig.from_directory(made).num_layers == 1
    assert Tokenizer.from_directory(made).is_fast
    assert [*cache.iterdir()] == [made]
    assert cache.stat().st_mode & 0o777 == 0o700


def test_the_second_start_converts_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model_directory(file)
    monkeypatch.setattr(module, "_convert", None)
    assert model_directory(file) == made
    (file.parent / "link.gguf").symlink_to(file)
    assert model_directory(file.parent / "link.gguf") == made


def test_another_content_or_version_has_another_directory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [model_directory(file)]
    os.utime(file, ns=(1, 1))
    made.append(model_directory(file))
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    made.append(model_directory(file))
    assert len(set(made)) == 3
    source = json.loads((made[1] / "gguf_source.json").read_text())
    assert source == {"path": str(file), "size": file.stat().st_size, "mtime_ns": 1}


def test_two_at_once_get_the_same_directory(file: Path, cache: Path, monkeypatch: Any) -> None:
    meeting, convert = threading.Barrier(2, timeout=60), module._convert

    def convert_together(*arguments: Any) -> Any:
        meeting.wait()  # both have found no directory
        return convert(*arguments)

    monkeypatch.setattr(module, "_convert", convert_together)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(model_directory(file))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert [*cache.iterdir()] == [found[0]] == [found[1]]


def test_an_interrupted_conversion_leaves_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Path, target: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model_directory(file)
    assert [*cache.iterdir()] == []
    assert model_directory(file).is_dir()


def test_what_a_killed_process_has_left_is_removed(file: Path, cache: Path) -> None:
    """A directory that is being made has a lock, which ends with its process."""
    for name in ("killed", "running", "new"):
        (cache / f".making-{name}").mkdir(parents=True)
    cache.chmod(0o700)
    for name in ("killed", "running"):
        (cache / f".making-{name}" / "config.json").touch()
    running = os.open(cache / ".making-running", os.O_RDONLY)
    try:
        fcntl.flock(running, fcntl.LOCK_EX)
        made = model_directory(file)
    finally:
        os.close(running)
    left = {path.name for path in cache.iterdir()} - {made.name}
    assert left == {".making-running", ".making-new"}


@pytest.fixture
def unwritable(cache: Path) -> Iterator[None]:
    """A cache in which nothing can be made, also by root."""
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file in place of the directory")
    yield
    assert cache.parent.is_file()


@pytest.mark.usefixtures("unwritable")
def test_without_a_cache_a_temporary_directory_serves(file: Path, tmp_path: Path) -> None:
    made = model_directory(file)
    assert made.parent == tmp_path / "temporary" / f"shmllm-{os.getuid()}-models"
    assert made.parent.stat().st_mode & 0o777 == 0o700
    assert model_directory(file) == made


@pytest.mark.usefixtures("unwritable")
def test_a_directory_that_others_can_write_is_not_used(file: Path, tmp_path: Path) -> None:
    place = tmp_path / "temporary" / f"shmllm-{os.getuid()}-models"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(EngineStartError, match=r"another user can write.*XDG_CACHE_HOME") as e:
        model_directory(file)
    assert "\n" not in str(e.value)
    assert [*place.iterdir()] == []


def test_a_full_disk_leaves_nothing(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, text: str, **_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(EngineStartError, match="No space left on device"):
        model_directory(file)
    assert [*cache.iterdir()] == []
    assert [*(tmp_path / "temporary").glob("*/*")] == []


def test_a_file_that_changes_meanwhile_is_refused(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = module.read_pieces

    def read_while_it_grows(paths: list[Path]) -> Any:
        header = read(paths)
        os.utime(paths[0], ns=(1, 1))
        return header

    monkeypatch.setattr(module, "read_pieces", read_while_it_grows)
    with pytest.raises(EngineStartError, match="changed while it was read"):
        model_directory(file)
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"text", b"GGUF\x03\0\0\0"])
def test_damaged_files_make_nothing(content: bytes, file: Path, cache: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(EngineStartError) as caught:
        model_directory(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not cache.exists()


def test_a_front_end_imports_neither_gguf_nor_numpy(file: Path) -> None:
    source = """
import json, sys
from shmllm.frontend.model_files import resolve_model
resolve_model(sys.argv[1])
heavy = {"gguf", "numpy", "torch", "transformers", "tokenizers", "yaml"}
print(json.dumps(sorted(heavy & {name.partition(".")[0] for name in sys.modules})))
"""
    assert [result_of(run_source(source, str(file))) for _ in range(2)] == [[], []]


def test_a_file_without_a_vocabulary_is_for_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    model = reference_model("llama", num_hidden_layers=1)
    write_model(file, model, lambda writer: writer.add_tokenizer_model("none"))
    made = model_directory(file)
    assert {each.name for each in made.iterdir()} & FILES == FILES - {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert ModelConfig.from_directory(made).num_layers == 1
    with pytest.raises(EngineStartError, match="no tokenizer"):
        Tokenizer.from_directory(made)
