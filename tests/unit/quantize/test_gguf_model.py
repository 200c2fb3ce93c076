"""Written GGUF files: the bytes are those of the `gguf` package, the model is the checkpoint's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.gguf_models import KINDS, kind_of, stored_tensors
from support.multimodal_models import nest
from support.quantize_helpers import change_config, writable_model
from support.reference_models import DENSE, NOT_IN_GGUF, VARIANTS
from support.variants import slow

from shmllm.errors import QuantizeError
from shmllm.formats.gguf import read_header
from shmllm.frontend.gguf.config import generation_config, model_config
from shmllm.models.config import ModelConfig
from shmllm.models.gguf_file import GgufFile
from shmllm.quantize.formats import GGUF_KINDS
from shmllm.quantize.gguf_metadata import find_gguf_family
from shmllm.quantize.job import quantize

SLOW = (
    *("mistral", "qwen2", "qwen3", "mixtral", "gemma2", "smollm3", "olmo3", *DENSE),
    *("afmoe", "exaone_moe", "granite_moe", "hunyuan_v1_moe", "llama4"),
    *("dots1", "mamba", "falcon_mamba", "bailing_moe_v2", "deepseek"),
)
FAMILY_PARAMS = [
    slow(kind) if kind in SLOW else kind for kind in VARIANTS if kind not in NOT_IN_GGUF
]
QUICK_FORMATS = ("gguf-q8_0", "gguf-q4_0", "gguf-bf16")
FORMAT_PARAMS = [each if each in QUICK_FORMATS else slow(each) for each in GGUF_KINDS]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("llama")
    return writable_model("llama", directory), directory


def expected_bytes(model: Any, kind: str) -> dict[str, bytes]:
    """The bytes of each tensor by its name in the file."""
    found = {}
    for _, stored, values in stored_tensors(model):
        chosen = KINDS[kind_of(stored, values, kind)]
        found[stored] = gguf.quants.quantize(values.copy(), chosen).tobytes()
    return found


def assert_bytes(model: Any, file: Path, kind: str) -> None:
    found = {each.name: each.data.tobytes() for each in gguf.GGUFReader(file).tensors}
    expected = expected_bytes(model, kind)
    assert found.keys() == expected.keys()
    assert [name for name, stored in expected.items() if found[name] != stored] == []


@pytest.mark.parametrize("format", FORMAT_PARAMS)
def test_the_bytes_are_those_of_the_package(
    format: str, llama: tuple[Any, Path], tmp_path: Path
) -> None:
    model, directory = llama
    report = quantize(str(directory), tmp_path / "m.gguf", format)
    assert_bytes(model, tmp_path / "m.gguf", GGUF_KINDS[format])
    assert report.bytes_after == (tmp_path / "m.gguf").stat().st_size < report.bytes_before
    assert 0 < report.drift <= report.worst < 0.2
    assert report.worst_name in dict(model.named_parameters())


@pytest.mark.parametrize("kind", FAMILY_PARAMS)
def test_a_family_keeps_its_model_and_its_tensors(kind: str, tmp_path: Path) -> None:
    model = writable_model(kind, tmp_path / "model")
    quantize(str(tmp_path / "model"), tmp_path / "m.gguf", "gguf-q8_0")
    assert_bytes(model, tmp_path / "m.gguf", "Q8_0")
    found = model_config(read_header(tmp_path / "m.gguf"))
    wanted = json.loads((tmp_path / "model" / "config.json").read_text())
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"):
        if name in found:  # which models of mixers alone lack
            assert found[name] == wanted.get(name, found[name]), name
    assert found["architectures"] == wanted["architectures"]


def test_the_drift_is_that_of_the_values_that_are_read_back(
    llama: tuple[Any, Path], tmp_path: Path
) -> None:
    model, directory = llama
    report = quantize(str(directory), tmp_path / "m.gguf", "gguf-q4_0")
    worst, errors, sizes = {}, 0.0, 0.0
    with GgufFile(tmp_path / "m.gguf") as file:
        for name, values in model.state_dict().items():
            if values.ndim < 2:
                continue
            with file.tensor(name) as found:
                error = float((found - values).double().square().sum())
            size = float(values.double().square().sum())
            worst[name] = (error / size) ** 0.5
            errors, sizes = errors + error, sizes + size
    assert report.num_tensors == len(worst)
    assert report.drift == pytest.approx((errors / sizes) ** 0.5, rel=1e-6)
    assert report.worst == pytest.approx(max(worst.values()), rel=1e-6)
    assert report.worst_name == max(worst, key=worst.__getitem__)


def test_matrices_with_incomplete_blocks_become_f16(tmp_path: Path) -> None:
    writable_model("llama", tmp_path / "model", intermediate_size=80)
    quantize(str(tmp_path / "model"), tmp_path / "m.gguf", "gguf-q4_0")
    kinds = {
        name: each.type_name for name, each in read_header(tmp_path / "m.gguf").tensors.items()
    }
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == "Q4_0"
    assert kinds["blk.0.attn_norm.weight"] == kinds["blk.0.attn_q.bias"] == "F32"


def test_llama_3s_factors_ends_and_sampling_defaults_are_stored(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    writable_model("llama", directory, rope_parameters=LLAMA3)
    settings = {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.5, "top_k": 7}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    quantize(str(directory), tmp_path / "m.gguf", "gguf-f16")
    header = read_header(tmp_path / "m.gguf")
    assert model_config(header)["rope_scaling"]["factor"] == 8.0
    found = generation_config(header)
    assert set(found["eos_token_id"]) == {0, 2}
    assert (found["temperature"], found["top_k"]) == (0.5, 7)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
          | {"truncate": False, "original_max_position_embeddings": 256}},
         "cannot express this model: layers.0..mixer.rope.truncate is False"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}
          | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
         "no tensor rope_factors_long in a GGUF file of Llama"),
        ({"num_hidden_layers": 4}, "has no model.layers.3"),
        ({"vocab_size": 4097}, "vocab_size is 4097"),
        ({"vocab_size": 9}, "has only 9 rows"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized already \(gptq\)"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_refused(
    fields: dict[str, Any], reason: str, llama: tuple[Any, Path], tmp_path: Path
) -> None:
    _, directory = llama
    copy = tmp_path / "model"
    copy.mkdir()
    for file in directory.iterdir():
        (copy / file.name).symlink_to(file)
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(content))
    change_config(copy, **fields)
    with pytest.raises(QuantizeError, match=reason) as error:
        quantize(str(copy), tmp_path / "m.gguf", "gguf-q8_0")
    assert "\n" not in str(error.value)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_what_modelopt_has_quantized_is_refused_without_a_word_in_config_json(
    llama: tuple[Any, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for file in llama[1].iterdir():
        (directory / file.name).symlink_to(file)
    content = json.dumps({"quantization": {"quant_algo": "NVFP4"}})
    (directory / "hf_quant_config.json").write_text(content)
    with pytest.raises(QuantizeError, match=r"quantized already \(modelopt\)"):
        quantize(str(directory), tmp_path / "m.gguf", "gguf-q8_0")


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        ("smollm3", {"no_rope_layer_interval": 2, "no_rope_layers": None}, "mixer.rope is"),
        ("olmo2", {"tie_word_embeddings": True}, "the LM head shares the embedding table"),
        ("qwen2_moe", {"norm_topk_prob": True}, "mlp.renormalize is True"),
        ("cohere2", {"layer_types": ["sliding_attention"] * 4}, "window is 48, it would become"),
    ],
)
def test_what_llama_cpp_knows_itself_cannot_be_another(
    kind: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    tied = {name: value for name, value in fields.items() if name == "tie_word_embeddings"}
    writable_model(kind, tmp_path / "model", **tied)
    change_config(tmp_path / "model", **fields)
    with pytest.raises(QuantizeError, match=reason):
        quantize(str(tmp_path / "model"), tmp_path / "m.gguf", "gguf-q8_0")


def test_a_family_that_llama_cpp_does_not_know_is_named(llama: tuple[Any, Path]) -> None:
    config = replace(ModelConfig.from_directory(llama[1]), architecture="OtherForCausalLM")
    with pytest.raises(QuantizeError, match=r"OtherForCausalLM cannot .*: LlamaF") as caught:
        find_gguf_family(config)
    known = str(caught.value).partition("supported: ")[2].split(", ")
    assert len(known) == len(set(known)) > 20, "each is named once"


@pytest.mark.parametrize(
    ("kind", "architecture", "model_type", "arch"),
    [
        ("qwen3", "Qwen3VLForConditionalGeneration", "qwen3_vl_text", gguf.MODEL_ARCH.QWEN3VL),
        ("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text", gguf.MODEL_ARCH.GEMMA3),
        ("llama", "Mistral3ForConditionalGeneration", "mistral", gguf.MODEL_ARCH.MISTRAL3),
    ],
)
def test_the_language_model_of_a_multimodal_one_is_written(
    kind: str, architecture: str, model_type: str, arch: gguf.MODEL_ARCH, tmp_path: Path
) -> None:
    fields = {"attention_bias": False} if kind == "llama" else {}
    model = writable_model(kind, tmp_path / "model", **fields)
    nest(tmp_path / "model", architecture, model_type, "new")
    quantize(str(tmp_path / "model"), tmp_path / "m.gguf", "gguf-q8_0")
    assert_bytes(model, tmp_path / "m.gguf", "Q8_0")
    header = read_header(tmp_path / "m.gguf")
    assert header.architecture == gguf.MODEL_ARCH_NAMES[arch]
    assert model_config(header)["hidden_size"] == 64


def test_the_factor_of_yarns_angles_is_stored(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 3.0}
    writable_model("llama", tmp_path / "model", rope_parameters=rope | {
        "original_max_position_embeddings": 256
    })  # fmt: skip
    quantize(str(tmp_path / "model"), tmp_path / "m.gguf", "gguf-q8_0")
    found = model_config(read_header(tmp_path / "m.gguf"))["rope_scaling"]
    assert found["attention_factor"] == pytest.approx(3.0, rel=1e-6)


def test_a_tensor_that_llama_cpp_does_not_know_is_refused(tmp_path: Path) -> None:
    writable_model("gemma2", tmp_path / "model", tie_word_embeddings=False)
    with pytest.raises(
        QuantizeError, match=r"lm_head\.weight has no name in a GGUF file of Gemma 2"
    ):
        quantize(str(tmp_path / "model"), tmp_path / "m.gguf", "gguf-q8_0")


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    writable_model("llama", tmp_path / "model", num_hidden_layers=1)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.full((96, 64), 1e9, np.float32)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(QuantizeError, match=r"up_proj\.weight has values that are not finite"):
        quantize(str(tmp_path / "model"), tmp_path / "m.gguf", "gguf-f16")
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
