"""Models in several GGUF files: found from any of them, equal to one file, and wrong ones named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.damaged_gguf import Reader, Value, written
from support.gguf_models import write_model
from support.model_helpers import load, reference_model

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import read_header
from shmllm.formats.gguf_pieces import models_in, pieces_of, read_pieces
from shmllm.frontend.gguf.directory import model_directory
from shmllm.frontend.model_catalog import num_parameters
from shmllm.frontend.model_files import resolve_model
from shmllm.frontend.model_listing import describe_models

MAX_TENSORS = 12


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a single file, and one with the same model in pieces; the middle of the three
    is another model's in `other`."""
    folder = tmp_path_factory.mktemp("files")
    reference = reference_model("llama", rope_parameters=None)
    for name in ("single", "pieces", "other"):
        (folder / name).mkdir()
    write_model(folder / "single" / "m.gguf", reference)
    write_model(folder / "pieces" / "m.gguf", reference, max_tensors=MAX_TENSORS)
    other = reference_model("qwen3", num_hidden_layers=3)
    write_model(folder / "other" / "m.gguf", other, max_tensors=MAX_TENSORS)
    return folder


@pytest.fixture
def pieces(files: Path, tmp_path: Path) -> list[Path]:
    shutil.copytree(files / "pieces", tmp_path / "pieces")
    found = sorted((tmp_path / "pieces").iterdir())
    assert [path.name for path in found] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return found


def test_weights_equal_those_of_the_single_file(files: Path, pieces: list[Path]) -> None:
    expected = load(model_directory(files / "single" / "m.gguf")).named_weights()
    made = resolve_model(str(pieces[0].parent))
    found = load(made).named_weights()
    assert all(torch.equal(found[name][0], views[0]) for name, views in expected.items())
    assert found.keys() == expected.keys()
    for path in pieces:
        assert resolve_model(str(path)) == made
    (pieces[0].parents[1] / "link.gguf").symlink_to(pieces[1])
    assert resolve_model(str(pieces[0].parents[1] / "link.gguf")) == made
    load_from = pieces[0].parents[1] / "with-config"
    shutil.copytree(pieces[0].parent, load_from)
    shutil.copy(made / "config.json", load_from)
    assert load(load_from).named_weights().keys() == expected.keys()
    os.utime(pieces[2], ns=(1, 1))
    assert resolve_model(str(pieces[0])) != made
    with pytest.raises(EngineStartError, match=r"00003-of-00003\.gguf has changed since"):
        load(made)


def test_links_to_pieces_under_other_names_are_pieces(pieces: list[Path], tmp_path: Path) -> None:
    """As in the cache of the hub, where names are links to blobs."""
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(pieces):
        blob = path.rename(tmp_path / "blobs" / f"blob{number}")
        path.symlink_to(blob)
    assert len([*load(resolve_model(str(pieces[1]))).named_weights()]) == 30


def test_models_lists_each_model_once_with_its_whole_size(
    files: Path, pieces: list[Path], tmp_path: Path
) -> None:
    whole = sum(path.stat().st_size for path in pieces)
    for given in (pieces[0].parent, pieces[2]):
        (record,) = describe_models(str(given))
        assert (record.size_bytes, record.problem) == (whole, None)
        assert record.parameters == num_parameters(files / "single" / "m.gguf")
    shutil.copy(files / "single" / "m.gguf", pieces[0].parent / "whole.gguf")
    names = ["m-00001-of-00003.gguf and 2 more pieces", "whole.gguf"]
    first, second = describe_models(str(pieces[0].parent))
    assert (first.name, first.size_bytes) == (str(pieces[0]), whole)
    assert second.name == str(pieces[0].parent / "whole.gguf")
    assert [path.name for path in models_in(pieces[0].parent)] == [pieces[0].name, "whole.gguf"]
    with pytest.raises(EngineStartError) as caught:
        resolve_model(str(pieces[0].parent))
    assert f"2 GGUF models ({', '.join(names)}); give the path of one" in str(caught.value)
    assert str(pieces[0]) in str(caught.value)


def set_value(path: Path, key: bytes, number: int | None) -> None:
    parts = Reader(path.read_bytes()).parts()
    parts.values = [each for each in parts.values if each.key != key]
    if number is not None:
        parts.values.append(Value(key, 4, number.to_bytes(4, "little")))
    path.write_bytes(written(parts))


def copy_piece(pieces: list[Path], source: Path) -> None:
    shutil.copy(source / pieces[1].name, pieces[1])


def without_count(pieces: list[Path]) -> None:
    for path in pieces:
        set_value(path, b"split.tensors.count", None)


Change = Callable[[list[Path], Path], object]
WRONG: dict[str, tuple[Change, str]] = {
    "a piece is missing": (
        lambda p, _: p[1].unlink(),
        r"m-00001-of-00003.gguf is one of 3 pieces .* lacks m-00002-of-00003\.gguf; copy",
    ),
    "the first piece is missing": (
        lambda p, _: p[0].unlink(),
        r"m-00002-of-00003.gguf is one of 3 pieces .* lacks m-00001-of-00003\.gguf; copy",
    ),
    "two have changed places": (
        lambda p, _: shutil.copy(p[2], p[1]),
        r"m-00002-of-00003.gguf: expected piece 2 of 3; .* split.no 2 \(from 0\) and split.count 3",
    ),
    "another count": (
        lambda p, _: set_value(p[2], b"split.count", 4),
        r"m-00003-of-00003.gguf: expected piece 3 of 3; .* split.count 4",
    ),
    "another model": (
        lambda p, files: copy_piece(p, files / "other"),
        r"m-00002-of-00003.gguf: split.tensors.count is 36, and 30 in m-00001-of-00003.gguf",
    ),
    "the same tensor twice": (
        lambda p, _: (shutil.copy(p[0], p[1]), set_value(p[1], b"split.no", 1)),
        r"m-00002-of-00003.gguf: \S+ is in m-00001-of-00003.gguf, too: .* different models",
    ),
    "another number of tensors": (
        lambda p, _: [set_value(each, b"split.tensors.count", 31) for each in p],
        r"m-00001-of-00003.gguf: split.tensors.count is 31, and the 3 pieces have 30 tensors",
    ),
    "no number of tensors": (
        lambda p, _: without_count(p),
        r"m-00001-of-00003.gguf: no number split.tensors.count",
    ),
    "a damaged piece": (
        lambda p, _: os.truncate(p[2], 1000),
        r"m-00003-of-00003.gguf is damaged or incomplete",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, pieces: list[Path], files: Path) -> None:
    change, message = WRONG[name]
    change(pieces, files)
    with pytest.raises(EngineStartError, match=message) as caught:
        resolve_model(str(pieces[0].parent))
    assert "\n" not in str(caught.value)
    (record,) = describe_models(str(pieces[0].parent))
    assert record.problem is not None


def test_a_piece_of_another_name_says_so(pieces: list[Path]) -> None:
    given = pieces[0].rename(pieces[0].with_name("first.gguf"))
    with pytest.raises(EngineStartError, match=r"first.gguf: one of 3 pieces .* names again"):
        resolve_model(str(given))


def test_names_that_only_look_like_pieces_are_single_files(files: Path, tmp_path: Path) -> None:
    for name in ("m-00001-of-00001.gguf", "m-1-of-2.gguf", "m-00001-of-00000.gguf"):
        path = Path(shutil.copy(files / "single" / "m.gguf", tmp_path / name))
        assert pieces_of(path) == [path]
        assert read_pieces([path]) == read_header(path)
