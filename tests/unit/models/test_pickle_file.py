"""Checkpoints of torch.save have the tensors of safetensors files, and run no code."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shmllm import LLM, SamplingParams
from shmllm.errors import EngineStartError
from shmllm.frontend.model_files import resolve_model
from shmllm.models.pickle_file import PICKLE_INDEX, SINGLE_PICKLE, PickleFile, find_pickles

PARAMS = SamplingParams(temperature=0, max_tokens=8)
OPTIONS: dict[str, Any] = {"multiprocess": False, "kv_cache_memory_bytes": 2**26}


def saved(tensors: Any, path: Path, **options: Any) -> PickleFile:
    torch.save(tensors, path, **options)
    return PickleFile(path)


def read(file: PickleFile) -> dict[str, torch.Tensor]:
    found = {}
    with file:
        for name in file.shapes():
            with file.tensor(name) as tensor:
                found[name] = tensor.clone()
    return found


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    whole = torch.arange(24.0).reshape(4, 6)
    return {
        "a": whole,
        "tied": whole,
        "rows": whole[1:3],
        "columns": whole.T,
        "half": torch.randn(3, 5).bfloat16(),
        "empty": torch.zeros(0, 3),
    }


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "before torch 1.6"])
def test_tensors_are_read_twice_with_their_bits(
    tensors: dict[str, torch.Tensor], is_archive: bool, tmp_path: Path
) -> None:
    file = saved(tensors, tmp_path / "m.bin", _use_new_zipfile_serialization=is_archive)
    for _ in range(2):
        found = read(file)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found[name], tensor)
            assert found[name].dtype == tensor.dtype
    assert file.num_bytes == file.path.stat().st_size
    assert file.num_bytes_read == sum(each.nbytes for each in tensors.values()) < file.num_bytes


def test_a_compressed_archive_has_the_same_tensors(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.save(tensors, tmp_path / "m.bin")
    compressed = tmp_path / "c.bin"
    with (
        zipfile.ZipFile(tmp_path / "m.bin") as archive,
        zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as other,
    ):
        for name in archive.namelist():
            other.writestr(name, archive.read(name))
    found = read(PickleFile(compressed))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_that_is_shorter_than_its_tensor_is_damage(method: int, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100), "b": torch.ones(200)}, tmp_path / "m.bin")
    short = tmp_path / "short.bin"
    with zipfile.ZipFile(tmp_path / "m.bin") as archive, zipfile.ZipFile(short, "w", method) as new:
        for name in archive.namelist():
            content = archive.read(name)
            new.writestr(name, content[:40] if name.endswith("data/0") else content)
    with pytest.raises(EngineStartError, match=r"short\.bin is damaged"):
        PickleFile(short).__enter__()


@pytest.mark.parametrize(
    "sizes",
    [
        {"data/0": 40, "data/9": 4000},
        {"data/0": 800, "data/1": 400},
        {"data/0": 40, "data/1": 1160},
    ],
    ids=["beside another one", "swapped", "beside a larger one"],
)
def test_each_member_has_the_size_of_its_own_tensor(sizes: dict[str, int], tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100), "b": torch.ones(200)}, tmp_path / "m.bin")
    wrong = tmp_path / "wrong.bin"
    with zipfile.ZipFile(tmp_path / "m.bin") as archive, zipfile.ZipFile(wrong, "w") as new:
        for name in archive.namelist():
            short = name.removeprefix("m/")
            content = bytes(sizes[short]) if short in sizes else archive.read(name)
            new.writestr(name, content)
        if "data/9" in sizes:
            new.writestr("m/data/9", bytes(sizes["data/9"]))
    with pytest.raises(EngineStartError, match=r"member 'm/data/0' has \d+ bytes, its tensors 400"):
        PickleFile(wrong).__enter__()


def test_the_sums_of_members_may_be_missing(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        found = read(saved(tensors, tmp_path / "m.bin"))
    finally:
        torch.serialization.set_crc32_options(True)
    assert found.keys() == tensors.keys()


def test_tensors_that_share_memory_do_not_exceed_the_size_of_the_file(tmp_path: Path) -> None:
    row = torch.randn(1, 1000)
    file = saved({"a": row, "b": row, "all": row.expand(50, 1000)}, tmp_path / "m.bin")
    found = read(file)
    assert torch.equal(found["all"], row.expand(50, 1000))
    assert file.num_bytes_read == file.num_bytes


def test_parameters_of_modules_are_tensors(tmp_path: Path) -> None:
    file = saved(torch.nn.Linear(3, 2).state_dict(keep_vars=True), tmp_path / "m.bin")
    assert not any(tensor.requires_grad for tensor in read(file).values())


def test_the_pages_of_a_view_are_read_again(tmp_path: Path) -> None:
    whole = torch.randn(600, 700)
    tensors = {"columns": whole.T, "some": whole[::3, 100:], "a": whole}
    file = saved(tensors, tmp_path / "m.bin")
    for _ in range(2):
        assert all(torch.equal(found, tensors[name]) for name, found in read(file).items())


def test_a_prefix_is_a_part_of_all_names(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "m.bin")
    found = read(PickleFile(tmp_path / "m.bin", "head."))
    assert list(found) == ["head.weight"]


class Harmful:
    """Makes a file where an ordinary unpickler reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("is_archive", [True, False])
def test_no_code_of_a_file_runs(is_archive: bool, tmp_path: Path) -> None:
    content = {"a": torch.ones(2), "b": Harmful(tmp_path / "made")}
    file = saved(content, tmp_path / "m.bin", _use_new_zipfile_serialization=is_archive)
    with pytest.raises(
        EngineStartError, match=r"m\.bin has more than tensors.*GLOBAL.*save_pretrained"
    ) as caught:
        file.__enter__()
    assert "weights_only" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "has a list, no tensors by names"),
        ({"model": {"a": torch.ones(2)}}, "model is no tensor but a dict"),
        ({1: torch.ones(2)}, "has a tensor with the name 1"),
        ({"a\nb": torch.ones(2)}, r"has a tensor with the name 'a\\nb'"),
        (
            {"a": torch.ones(2).to_sparse()},
            "a has layout torch.sparse_coo; supported: torch.strided",
        ),
        ({"a": torch.ones(2, device="meta")}, "a has no numbers"),
        (7, "has a int"),
    ],
)
def test_what_is_no_state_dict_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=message):
        saved(content, tmp_path / "m.bin").__enter__()


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("is_archive", [True, False])
def test_a_truncated_file_is_an_error(is_archive: bool, kept: float, tmp_path: Path) -> None:
    content = {"a": torch.ones(300, 7)}
    file = saved(content, tmp_path / "m.bin", _use_new_zipfile_serialization=is_archive)
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(EngineStartError, match=re.escape(str(file.path))):
        read(file)


def test_an_archive_of_something_else_is_an_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.bin", "w") as archive:
        archive.writestr("a", "text")
    with pytest.raises(EngineStartError, match=r"damaged or no file of torch\.save"):
        PickleFile(tmp_path / "m.bin").__enter__()


def test_integers_of_32_bits_are_no_weights(tmp_path: Path) -> None:
    file = saved({"a": torch.ones(2, dtype=torch.int32)}, tmp_path / "m.bin")
    with file, pytest.raises(EngineStartError, match="a has type int32; supported: float64, fl"):
        file.check("a")


def test_a_file_that_changes_is_an_error(tmp_path: Path) -> None:
    file = saved({"a": torch.ones(2)}, tmp_path / "m.bin")
    read(file)
    torch.save({"a": torch.ones(300)}, file.path)
    with pytest.raises(EngineStartError, match=r"has changed while it was read"):
        read(file)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    assert find_pickles(tmp_path) == []
    index = {"weight_map": {"a": "pytorch_model-1.bin"}}
    (tmp_path / PICKLE_INDEX).write_text(json.dumps(index))
    with pytest.raises(EngineStartError, match=r"missing shard .*-1\.bin, which .*index\.json"):
        find_pickles(tmp_path)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_model_has_the_tokens_of_its_safetensors_file(num_shards: int, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), directory)
    with LLM(str(directory), **OPTIONS) as llm:
        wanted = llm.generate("import os", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    if num_shards == 1:
        torch.save(tensors, directory / SINGLE_PICKLE)
    else:
        names = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(tensors)}
        for shard in set(names.values()):
            own = {name: tensors[name] for name in tensors if names[name] == shard}
            torch.save(own, directory / shard)
        (directory / PICKLE_INDEX).write_text(json.dumps({"weight_map": names}))
    with LLM(str(directory), **OPTIONS) as llm:
        found = llm.generate("import os", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    assert found == wanted
