"""Queries, keys and values in one tensor of a GGUF file, one above the other: the model is that of
the file that has them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf_cases import CASES
from support.gguf_loading import loaded
from support.gguf_models import (
    KINDS,
    Change,
    Rearrange,
    StoredTensors,
    quantized,
    with_fused_qkv,
    write_model,
)
from support.gguf_read_alone import READ_ALONE
from support.model_helpers import reference_model
from support.variants import slow
from transformers import PreTrainedModel

from shmllm.errors import EngineStartError
from shmllm.formats.gguf import read_header
from shmllm.models.matrices import packed_of

WIDE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
LLAMA = {"attention_bias": True, "head_dim": 32, "num_hidden_layers": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": WIDE | LLAMA,
    "qwen3_5": WIDE | READ_ALONE["qwen3.5"][1],
    "gemma4": WIDE | READ_ALONE["gemma 4"][1] | {"num_hidden_layers": 2, "layer_types": None},
    "granite_moe_hybrid": CASES["granite 4"][1],
}
"""Queries and keys in another order, with biases; gates beside queries, and delta nets in other
layers; heads of two widths; layers without heads of keys."""


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return reference_model("llama", **OPTIONS["llama"])


def files_of(
    model: PreTrainedModel, directory: Path, change: Change | None = None, kind: str = "F32"
) -> tuple[Path, Path]:
    """The file with three tensors, and that with one."""
    return (
        write_model(directory / "apart.gguf", model, change, kind=kind),
        write_model(directory / "fused.gguf", model, change, kind=kind, rearrange=with_fused_qkv),
    )


def assert_same(apart: Path, fused: Path) -> dict[str, str | None]:
    """Check that both files give the same bits, and return the kinds of packed matrices."""
    first, second = (loaded(each, each.with_suffix("")).destinations() for each in (apart, fused))
    assert first.keys() == second.keys()
    kinds = {}
    for name, (view, *_) in first.items():
        other = second[name][0]
        assert torch.equal(other.clone(), view.clone()), name
        one, two = (getattr(packed_of(each), "kind", None) for each in (view, other))
        assert one == two, name
        kinds[name] = one
    return kinds


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q8_0"),
        ("qwen3_5", "Q8_0"),
        ("gemma4", "Q8_0"),
        ("granite_moe_hybrid", "F32"),
        slow("llama", "F32"),
        slow("qwen3_5", "F32"),
        slow("gemma4", "F32"),
    ],
)
def test_the_model_is_that_of_a_file_with_three_tensors(
    family: str, kind: str, tmp_path: Path
) -> None:
    options = OPTIONS[family]
    apart, fused = files_of(reference_model(family, **options), tmp_path, kind=kind)
    names = set(read_header(fused).tensors) - set(read_header(apart).tensors)
    assert {name.split(".")[2] for name in names} == {"attn_qkv"}
    kinds = assert_same(apart, fused)
    stored = None if kind == "F32" else "q8_0"
    assert {kinds[name] for name in kinds if name.endswith("k_proj.weight")} == {stored}


APART = ("mimo v2 flash", "mimo v2 flash without a factor")
"""Heads of values are narrower than those of keys, and files have one tensor for each."""


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in APART])
def test_it_is_so_in_every_family(case: str, tmp_path: Path) -> None:
    family, options, change = CASES[case]
    apart, fused = files_of(reference_model(family, **options), tmp_path, change)
    assert_same(apart, fused)


@pytest.mark.slow
@pytest.mark.parametrize("case", APART)
def test_narrower_values_are_not_read_from_one_tensor(case: str, tmp_path: Path) -> None:
    family, options, change = CASES[case]
    _, fused = files_of(reference_model(family, **options), tmp_path, change)
    with pytest.raises(EngineStartError, match=r"a tensor the model lacks: blk\.0\.attn_qkv"):
        loaded(fused, tmp_path / "model").destinations()


def cut(stored: str, num_rows: int) -> Rearrange:
    """The tensors of a damaged file: one of them has other rows."""

    def rearranged(tensors: StoredTensors) -> StoredTensors:
        for name, found, values in with_fused_qkv(tensors):
            yield name, found, values[:num_rows] if found == stored else values

    return rearranged


@pytest.mark.parametrize(
    ("stored", "num_rows", "message"),
    [
        ("blk.0.attn_qkv.weight", 224, r"qkv\.weight has the shape \[224, 64\], .* ask for \[256"),
        ("blk.1.attn_qkv.weight", 224, r"q_proj\.weight has shape \[112, 64\], .* for \[128, 64"),
        ("blk.1.attn_qkv.weight", 250, "has 250 rows for 4 [+] 2 [+] 2 heads of equal widths"),
        ("blk.1.attn_qkv.bias", 3, r"blk\.1\.attn_qkv\.bias has 3 rows for 4 [+] 2 [+] 2 heads"),
        ("blk.1.attn_qkv.bias", 0, r"blk\.1\.attn_qkv\.bias has 0 rows"),
        ("blk.1.attn_qkv.bias", 8, r"blk\.1\.attn_qkv\.bias has 4 rows for 4 heads"),
    ],
)
def test_other_numbers_of_rows_are_refused(
    llama: PreTrainedModel, stored: str, num_rows: int, message: str, tmp_path: Path
) -> None:
    file = write_model(tmp_path / "m.gguf", llama, rearrange=cut(stored, num_rows))
    with pytest.raises(EngineStartError, match=message) as caught:
        loaded(file, tmp_path / "model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "kind", "message"),
    [
        ("blk.1.attn_k.weight", "F32", r"attn_k\.weight and .*attn_qkv\.weight have the same"),
        ("blk.1.attn_qkv.bias", "Q8_0", "has type Q8_0, and blocks of several rows"),
    ],
)
def test_tensors_that_say_no_rows_or_the_same_are_refused(
    llama: PreTrainedModel, stored: str, kind: str, message: str, tmp_path: Path
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        values = np.zeros((64, 64) if stored.endswith("weight") else 256, np.float32)
        writer.add_tensor(stored, quantized(values, kind), raw_dtype=KINDS[kind])

    def others(tensors: StoredTensors) -> StoredTensors:
        return (each for each in with_fused_qkv(tensors) if each[1] != stored)

    file = write_model(tmp_path / "m.gguf", llama, add, rearrange=others)
    with pytest.raises(EngineStartError, match=message):
        loaded(file, tmp_path / "model")


def test_a_layer_without_a_number_of_heads_is_named(llama: PreTrainedModel, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["llama.attention.head_count_kv"]
        writer.add_head_count_kv([2])

    file = write_model(tmp_path / "m.gguf", llama, change, rearrange=with_fused_qkv)
    with pytest.raises(EngineStartError, match=r"_kv must be .* for blk\.1.*found nothing$"):
        loaded(file, tmp_path / "model")


def test_biases_may_be_apart(llama: PreTrainedModel, tmp_path: Path) -> None:
    def fused(tensors: StoredTensors) -> StoredTensors:
        every = list(tensors)
        yield from with_fused_qkv(each for each in every if not each[1].endswith("bias"))
        yield from (each for each in every if each[1].endswith("bias"))

    apart, _ = files_of(llama, tmp_path)
    assert_same(apart, write_model(tmp_path / "some.gguf", llama, rearrange=fused))


def test_latents_have_none(tmp_path: Path) -> None:
    family, options = READ_ALONE["youtu"]
    file = write_model(
        tmp_path / "m.gguf",
        reference_model(family, **options),
        lambda writer: writer.add_tensor("blk.1.attn_qkv.weight", np.ones((8, 48), np.float32)),
    )
    with pytest.raises(EngineStartError, match=r"the model lacks: blk\.1\.attn_qkv\.weight"):
        loaded(file, tmp_path / "model")
