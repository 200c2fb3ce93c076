"""The tests of models and engines with packed weights on a device.

Their logits equal those of the CPU's program with the values that the weights stand for. Each
folder has a fixture `gpu_device`: the fake GPU, or a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import gpu_engine
from conformance.gpu_engine import PROMPTS, Engine, make_config
from conformance.gpu_program import (
    SHAPE,
    TOLERANCES,
    add_prompts,
    assert_replay_equals_launch,
)
from support.gguf_models import write_model
from support.gpu_steps import GpuSteps
from support.model_helpers import our_logits, reference_model, save
from support.packed_deepseek_v4 import pack_as_published
from support.quantized_checkpoints import (
    config_group,
    load_packed,
    named,
    pack_quantized,
    write_checkpoint,
)
from support.reference_models import ENTRIES
from support.variants import slow

from shmllm.formats.gguf_pieces import pieces_of, read_pieces
from shmllm.frontend.gguf.config import model_config
from shmllm.models.matrices import MixedMatrix, parts_of
from shmllm.wire.messages import Method

WORK = ({0: 6}, {0: 2, 1: 3}, {0: 1, 1: 1}, {0: 1})
NAMES = "model.layers.{}.{}.weight"
LAYERS = range(2)


def of_layers(**kinds: str) -> dict[str, str]:
    """The types of some projections of all layers."""
    where = {"v_proj": "self_attn.v_proj", "down_proj": "mlp.down_proj"}
    return {NAMES.format(n, where[name]): kind for name, kind in kinds.items() for n in LAYERS}


FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixed": (
        "llama",
        {},
        {
            "kind": "Q4_0",
            "kinds": {"lm_head.weight": "Q8_0", **of_layers(v_proj="Q5_1", down_proj="Q8_0")},
        },
    ),
    "k-quants": (
        "qwen2",
        {"hidden_size": 256, "intermediate_size": 256, "tie_word_embeddings": True},
        {"kind": "Q4_K", "kinds": of_layers(v_proj="Q6_K", down_proj="Q5_K")},
    ),
    "experts": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {"kind": "Q4_1"},
    ),
}
"""The family, its options and those of `write_model`."""


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def gguf(name: str, directory: Path) -> Path:
    """A directory with a GGUF file and its config.json."""
    family, options, kinds = FILES[name]
    model = reference_model(family, 4.0, **SHAPE | options)
    file = write_model(directory / "model.gguf", model, **kinds)
    (directory / "config.json").write_text(json.dumps(model_config(read_pieces(pieces_of(file)))))
    return directory


def compressed(directory: Path, family: str = "llama", **shape: Any) -> Path:
    """A checkpoint of compressed-tensors: 4 bits, groups of 32, without zeros."""
    model = reference_model(family, 4.0, **shape)
    model.save_pretrained(directory)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("_proj.weight"):
            weight = pack_quantized((tensor.shape[0], tensor.shape[1]))
            tensors |= named(name.removesuffix(".weight"), weight)
        else:
            tensors[name] = tensor
    (directory / "model.safetensors").unlink()
    config = config_group(num_bits=4, strategy="group", group_size=32)
    return write_checkpoint(directory, config, tensors)


def assert_equals_the_values(directory: Path, steps: GpuSteps, dtype: torch.dtype) -> None:
    """Compare the logits of some steps with those of the CPU's program in float32."""
    wide = load_packed(directory, keeps_packed=False)
    add_prompts(steps, {0: 10, 1: 4})
    for work in WORK:
        for row, logits in steps.step(work).items():
            want = our_logits(wide, steps.tokens[row][:-1])[-1]
            assert float((logits - want).abs().max() / want.abs().max()) < TOLERANCES[dtype]


class PackedProgramConformance:
    @pytest.mark.parametrize("name", ["mixed", "experts", slow("k-quants")])
    def test_a_gguf_file(self, gpu_device, tmp_path, name) -> None:
        directory = gguf(name, tmp_path)
        steps = GpuSteps(gpu_device, directory)
        assert steps.model.has_packed
        if name != "experts":
            assert isinstance(steps.model.layers[0].mixer.qkv_proj.weight, MixedMatrix)
            assert not isinstance(parts_of(steps.model.embedding.table)[0], torch.Tensor)
        assert_equals_the_values(directory, steps, torch.float32)

    def test_compressed_tensors(self, gpu_device, tmp_path, dtype) -> None:
        directory = compressed(tmp_path, **SHAPE)
        steps = GpuSteps(gpu_device, directory, dtype=dtype)
        assert steps.model.layers[0].mixer.o_proj.weight.kind == "int4"
        assert_equals_the_values(directory, steps, dtype)

    def test_a_mamba_whose_inner_projections_are_packed(self, gpu_device, tmp_path) -> None:
        shape = {"hidden_size": 64, "intermediate_size": 128, "time_step_rank": 32}
        shape |= {"num_hidden_layers": 2, "tie_word_embeddings": False}
        directory = compressed(tmp_path, "falcon_mamba", **shape)
        steps = GpuSteps(gpu_device, directory)
        mixer = steps.model.layers[0].mixer
        assert not isinstance(mixer.x_proj.weight, torch.Tensor)
        assert not isinstance(mixer.dt_proj.weight, torch.Tensor)
        assert_equals_the_values(directory, steps, torch.float32)

    @pytest.mark.slow
    def test_experts_in_mxfp4_and_matrices_in_fp8(self, gpu_device, tmp_path) -> None:
        sizes = {name: SHAPE[name] for name in ("hidden_size", "max_position_embeddings")}
        sizes |= {"intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 4}
        model = reference_model("deepseek_v4", **ENTRIES | sizes)
        directory = tmp_path / "packed"
        pack_as_published(save(model, tmp_path / "plain"), directory)
        steps = GpuSteps(gpu_device, directory)
        assert steps.model.has_packed
        assert_equals_the_values(directory, steps, torch.float32)

    @pytest.mark.slow
    def test_replays_equal_launches(self, gpu_device, tmp_path) -> None:
        steps = GpuSteps(gpu_device, gguf("mixed", tmp_path), "FULL_DECODE_ONLY", (2,))
        steps.program.capture()
        add_prompts(steps, {0: 3, 1: 1})
        steps.step({0: 3, 1: 1})
        assert_replay_equals_launch(steps, steps.prepare({0: 1, 1: 1}))

    @pytest.mark.slow
    def test_an_engine_sleeps_and_rounds_new_weights_as_on_a_cpu(
        self, gpu_device, tmp_path
    ) -> None:
        shape = gpu_engine.SHAPE
        config = make_config(compressed(tmp_path, **shape), num_seqs=2)
        engines = [Engine(config, device) for device in (gpu_device, None)]
        other = reference_model("llama", 4.0, **shape | {"rope_theta": 10000.0})
        with torch.no_grad():
            for name, weight in other.named_parameters():
                weight.copy_(weight.flip(0) if "proj" in name else weight)
        for engine in engines:
            engine.add(0, PROMPTS[1])
            engine.step()
            engine.call(Method.SLEEP, {"level": 1, "mode": "keep"})
            engine.call(Method.WAKE_UP)
            engine.run()
            engine.call(Method.SLEEP, {"level": 2, "mode": "keep"})
            engine.call(Method.WAKE_UP)
            engine.core.settle()
            engine.runner.model.load_weights(other.state_dict().items())
            engine.core.weights.weights_changed()
            engine.add(1, PROMPTS[1])
            engine.run()
        ours, theirs = engines
        assert ours.tokens == theirs.tokens
        assert ours.tokens[0] != ours.tokens[1]
        mine, other_info = (engine.runner.info for engine in engines)
        assert mine.quantization == other_info.quantization != ""
        assert mine.weight_bytes == other_info.weight_bytes
        weights = theirs.runner.model.named_weights()
        for name, views in ours.runner.model.named_weights().items():
            assert torch.equal(views[0].clone().cpu(), weights[name][0].clone()), name
