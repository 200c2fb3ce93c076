"""A model's forward pass through the Triton kernels, on the fake GPU."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conformance.device import no_waits
from conformance.gpu_program import (
    SCALE,
    SHAPE,
    VARIANTS,
    ProgramConformance,
    _inference_mode,
    add_prompts,
    assert_equals_transformers,
    models,
)
from support.cache_shapes import cache_shape
from support.fake_gpu import eager, lazy
from support.gpu_steps import GpuSteps
from support.model_helpers import reference_model, save
from support.variants import slow

from shmllm.config.graphs import CudaGraphMode
from shmllm.config.load import LoadConfig
from shmllm.errors import EngineStartError
from shmllm.models.config import ModelConfig, RopeConfig
from shmllm.models.further_layer import FurtherLayer
from shmllm.models.layers import Storage
from shmllm.worker.gpu import attention
from shmllm.worker.gpu.buffers import GpuBuffers
from shmllm.worker.gpu.cache import GpuKVCache, block_bytes, cache_bytes
from shmllm.worker.gpu.ops import GpuOps
from shmllm.worker.gpu.program import check_model
from shmllm_kernels.gpu import few_delta_net, pair_layout
from shmllm_kernels.gpu.few_rows import MAX_ROWS
from shmllm_kernels.reference.norm import rms_norm

__all__ = ["_inference_mode", "models"]

MIXTURE = (
    "_route",
    "_route_rows",
    "_sort_pairs",
    "multiply_gate_and_up",
    "multiply_down",
    "_combine",
)
"""The kernels of a mixture of experts."""


class TestProgram(ProgramConformance):
    pass


@pytest.mark.usefixtures("launches_only")
def test_a_full_replay_launches_nothing_else(gpu_device, models) -> None:
    """The host does not wait in any step either."""
    steps = GpuSteps(gpu_device, models("llama")[1], "FULL_AND_PIECEWISE", (2,))
    steps.program.capture()
    add_prompts(steps, {0: 1, 1: 2})
    launched = []
    with no_waits(gpu_device):
        for work in ({0: 1}, {1: 2}):
            step = steps.prepare(work)
            gpu_device.launched.clear()
            steps.program.run(step.mode, step.descriptor, step.max_query_len)
            launched.append(list(gpu_device.launched))
    attention, logits = ["attend", "merge_splits"], ["_copy_rows", "multiply_single_row"]
    pieces = ["graph", *attention, "graph", *attention, "graph", *logits]
    assert launched == [["graph"], pieces]


@pytest.mark.parametrize(
    ("name", "most_tokens"), [("mixtral", 512), slow("gemma4", 512), ("mixtral", 2)]
)
def test_the_pairs_of_few_tokens_are_laid_out_by_the_router(
    gpu_device, models, monkeypatch, name, most_tokens
) -> None:
    """A mixture is four launches then, and five where a step has more tokens."""
    monkeypatch.setattr(pair_layout, "MOST_TOKENS", most_tokens)
    reference, directory = models(name)
    steps = GpuSteps(gpu_device, directory)
    steps.program.warm_up()
    add_prompts(steps, {0: 9, 1: 5})
    for work in ({0: 8, 1: 4}, {0: 1, 1: 1}):
        num_tokens = sum(work.values())
        router = "_route_rows" if num_tokens <= MAX_ROWS else "_route"
        gpu_device.launched.clear()
        for row, logits in steps.step(work).items():
            assert_equals_transformers(logits, reference, steps.tokens[row][:-1])
        launched = list(gpu_device.launched)
        first = launched.index(router)
        sort = ["_sort_pairs"] if num_tokens > most_tokens else []
        of_mixture = [router, *sort, "multiply_gate_and_up", "multiply_down", "_combine"]
        assert [each for each in launched[first:] if each in MIXTURE][
            : len(of_mixture)
        ] == of_mixture
        assert launched.count("_sort_pairs") == (launched.count(router) if sort else 0)
        for buffers in steps.buffers.experts.values():
            assert buffers.scratch.num_done.item() == 0


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize(
    ("num_requests", "product", "before_logits"),
    [(1, "multiply_single_row", []), (3, "multiply_few_rows", ["_copy_rows"])],
)
def test_a_step_of_few_tokens_is_five_launches_a_layer(
    gpu_device, models, num_requests, product, before_logits
) -> None:
    """Each waits for the one before: what it waits for is most of a small model's step."""
    _, directory = models("llama")
    steps = GpuSteps(gpu_device, directory)
    steps.program.warm_up()
    rows = dict.fromkeys(range(num_requests), 1)
    add_prompts(steps, dict.fromkeys(rows, 3))
    steps.step(dict.fromkeys(rows, 2))
    gpu_device.launched.clear()
    steps.run(steps.prepare(rows))
    layer = [product, "attend_decodes", *[product] * 3]
    begin, launched = ["_copy_rows", "_rope_tables"], list(gpu_device.launched)
    first = launched.index(begin[0])
    assert launched[first : first + 12] == [*begin, *layer, *layer]
    rest = ["_rms_norm", *before_logits, product]
    assert launched[first + 12 :][: len(rest)] == rest


def launches_of_a_decode(gpu_device, directory, num_requests: int) -> list[str]:
    """What a decode of some requests launches behind the embedding and the tables of rotary
    embeddings."""
    steps = GpuSteps(gpu_device, directory)
    steps.program.warm_up()
    rows = dict.fromkeys(range(num_requests), 1)
    add_prompts(steps, dict.fromkeys(rows, 3))
    steps.step(dict.fromkeys(rows, 2))
    step = steps.prepare(rows)
    gpu_device.launched.clear()
    steps.program.run(step.mode, step.descriptor, step.max_query_len)  # nobody waits for it
    launched = list(gpu_device.launched)
    begin = "_rope_tables" if "_rope_tables" in launched else "_copy_rows"
    return launched[launched.index(begin) + 1 :]


@pytest.mark.slow
@pytest.mark.usefixtures("launches_only")
def test_an_activation_with_numbers_of_its_own_is_a_launch_of_its_own(gpu_device, models) -> None:
    launched = launches_of_a_decode(gpu_device, models("apertus")[1], 1)
    product = "multiply_single_row"
    layer = [product, "attend_decodes", product, product, "_xielu", product]
    assert launched[: 2 * len(layer)] == layer + layer


ENDS = (
    (("gemma2", "olmo2", "glm4", "olmo3", "exaone4", "hyperclovax"), ["_add_normed", "_rms_norm"]),
    (("cohere2", "cohere", "stablelm", "opt", "starcoder2"), ["_layer_norm"]),
    (
        (
            *("gpt_neox", "gptj", "nemotron", "phi"),
            *("codegen", "falcon", "gpt_bigcode", "gpt_neo", "jais2"),
        ),
        ["_layer_norm"],
    ),
    (("arcee", "cwm", "ernie4_5", "exaone", "gemma", "glm", "minicpm"), ["_rms_norm"]),
    (("helium", "seed_oss", "vaultgemma"), ["_rms_norm"]),
)
END_OF = {name: end for names, end in ENDS for name in names}
"""The families with five launches a layer, and what follows the last one."""
QUICK_LAYERS = ("gemma2", "cohere2", "olmo2")


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("name", [each if each in QUICK_LAYERS else slow(each) for each in END_OF])
def test_norms_behind_blocks_and_parallel_blocks_are_five_launches_a_layer(
    gpu_device, models, name
) -> None:
    """The product that reads the residual stream adds such a norm to it, and attention computes
    norms of all heads. A sum behind attention waits until the MLP has read the norm that attention
    has read."""
    products = dict.fromkeys(("multiply_single_row", "multiply_few_rows"), "product")
    found = launches_of_a_decode(gpu_device, models(name)[1], 1)
    launched = [products.get(each, each) for each in found]
    layer = ["product", "attend_decodes", *["product"] * 3]
    assert launched[: 2 * len(layer) + len(END_OF[name])] == [*layer, *layer, *END_OF[name]]


def launches_of_experts(num_requests: int) -> list[str]:
    """What a mixture launches behind its router for a decode of some requests."""
    few = ["multiply_gate_and_up", "multiply_down", "_combine"]
    return few if num_requests > 1 else ["multiply_single_row", "combine_single_row"]


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize(
    "name",
    [
        "qwen2_moe",
        *map(
            slow,
            (
                *("mixtral", "qwen3_moe", "gpt_oss", "minimax_m2"),
                *("granite_moe", "granite_moe_shared", "granite_moe_swa"),
            ),
        ),
    ],
)
@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_layer_with_a_mixture_of_experts_is_six_launches_for_one_token_and_seven_for_few(
    gpu_device, models, num_requests, name
) -> None:
    """Norm, router and choice are one, the sum of experts is added to the residual stream in its
    launch, and a shared expert is computed with the others."""
    product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
    layer = [product, "attend_decodes", product, "_route_rows"]
    layer += launches_of_experts(num_requests)
    launched = launches_of_a_decode(gpu_device, models(name)[1], num_requests)
    assert launched[: 2 * len(layer) + 1] == [*layer, *layer, "_rms_norm"]


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize(
    "name", [*map(slow, ("ernie4_5_moe", "exaone_moe", "hy_v3", "afmoe", "flex_olmo"))]
)
def test_a_norm_behind_blocks_is_a_launch_before_a_router_and_none_before_an_mlp(
    gpu_device, models, num_requests, name
) -> None:
    """The product that adds such a norm to the residual stream has the kernel of few rows. All but
    FlexOlmo have an MLP in the first layer, and the first three have no such norms."""
    product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
    norm = ["_add_normed"] if name in ("afmoe", "flex_olmo") else []
    reader = "multiply_few_rows" if norm else product
    mixture = ["attend_decodes", product, *norm, "_route_rows", *launches_of_experts(num_requests)]
    first = mixture if name == "flex_olmo" else ["attend_decodes", product, reader, product]
    expected = [product, *first, reader, *mixture, *norm, "_rms_norm"]
    launched = launches_of_a_decode(gpu_device, models(name)[1], num_requests)
    assert launched[: len(expected)] == expected


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("name", ["deepseek_v3", slow("glm4_moe_lite")])
def test_a_layer_with_latent_attention_is_five_launches_before_its_mlp(
    gpu_device, models, name, num_requests
) -> None:
    """One more if queries are a projection of a projection. The second layer has a mixture."""
    product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
    firsts = [product] * (2 if name == "glm4_moe_lite" else 1)
    attention = [*firsts, "_absorb_queries", "attend_latents", "_project_values", product]
    mixture = ["_route_rows", *launches_of_experts(num_requests)]
    launched = launches_of_a_decode(gpu_device, models(name)[1], num_requests)
    expected = [*attention, product, product, *attention, *mixture, "_rms_norm"]
    assert launched[: len(expected)] == expected


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_shared_expert_as_wide_as_no_number_of_others_is_two_launches(
    gpu_device, models, num_requests
) -> None:
    product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
    launched = launches_of_a_decode(gpu_device, models("granite_moe_hybrid")[1], num_requests)
    mixture = ["_route_rows", product, product, *launches_of_experts(num_requests)]
    first = launched.index("_route_rows")
    assert launched[first : first + len(mixture)] == mixture


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_requests", [1, 3])
def test_experts_that_read_a_latent_are_launches_of_their_products(
    gpu_device, models, num_requests
) -> None:
    """The first product of the shared expert computes the norm, and so does the router, before the
    last one changes the stream; both sums are added to the stream in the launches of products."""
    product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
    without_gates = {"multiply_gate_and_up": "multiply_up"}
    mixture = [without_gates.get(each, each) for each in launches_of_experts(num_requests)]
    experts = [product, "_route_rows", product, product, *mixture]
    layer, attention = [*experts, product], [product, "attend_decodes", product]
    launched = launches_of_a_decode(gpu_device, models("nemotron_3")[1], num_requests)
    expected = [*layer, *attention, *layer, "_rms_norm"]
    assert launched[: len(expected)] == expected


@pytest.mark.slow
@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_requests", [1, 3])
def test_the_launches_of_a_compressed_attention(gpu_device, models, num_requests) -> None:
    """Of a window, and with entries, all of them or those that an indexer chooses. The first layer
    chooses experts by ids."""
    product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
    attend = [product, "_rotate_heads", "attend_latents", "merge_splits", "_rotate_heads"]
    attend += ["aten::bmm", product]
    mixture = ["multiply_gate_and_up", "multiply_down", "_combine"]
    shared = [product, "_activate", product]
    by_token = ["_rms_norm", "aten::mm", "_route_by_token", *shared, "_sort_pairs", *mixture]
    by_logits = ["_route_rows", *shared, *mixture]
    made, chosen = [product, "_store_rows", "_compress"], [product, product, "_score_index_keys"]
    fold, spread = ["_multiply", "_fold"], ["_spread"]
    layers = [
        (["_list_keys"], by_token),
        ([*made, "_list_keys"], by_logits),
        ([*made, "_compress", *chosen, "_list_keys"], by_logits),
    ]
    expected = ["_rope_tables", "_rope_tables", "copy"]
    for lists, experts in layers:
        expected += [*fold, product, "_store_keys", *lists, *attend, *spread]
        expected += [*fold, *experts, *spread]
    launched = launches_of_a_decode(gpu_device, models("deepseek_v4")[1], num_requests)
    first = launched.index("copy") - 2
    assert launched[first : first + len(expected) + 1] == [*expected, "_multiply"]


@pytest.mark.usefixtures("launches_only")
def test_larger_steps_have_other_launches_of_latent_attention(gpu_device, models) -> None:
    steps = GpuSteps(gpu_device, models("deepseek_v3")[1])
    steps.program.warm_up()
    add_prompts(steps, {0: 9})
    gpu_device.launched.clear()
    steps.step({0: 9})
    launched = set(gpu_device.launched)
    assert {"_write_latents", "_rope_write", "aten::bmm"} <= launched
    assert not launched & {"_absorb_queries", "_project_values"}


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("qwen3_5", ["_run_delta_net"]),
        ("mamba2", ["_run_mamba2", "_gated_norm"]),
        ("lfm2", ["_short_convolution"]),
        ("mamba", ["_project_inputs", "_scan_inputs"]),
        slow("falcon_mamba", ["_project_inputs", "_scan_inputs"]),
    ],
)
def test_the_launches_of_a_layer_with_a_recurrent_state(
    gpu_device, models, name, own, num_requests
) -> None:
    product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
    layer = [product, *own, product]
    launched = launches_of_a_decode(gpu_device, models(name)[1], num_requests)
    assert launched[: len(layer)] == layer


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_requests", [slow(1), 3])
def test_the_launches_of_mixers_side_by_side(gpu_device, models, num_requests) -> None:
    """Products that read the norm compute it, and those behind the mixers add to the stream."""
    product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
    launched = launches_of_a_decode(gpu_device, models("falcon_h1")[1], num_requests)
    mamba = [product, "aten::mul_", "_run_mamba2", "_gated_norm"]
    mlp = ["_rms_norm", "aten::mul_", product, product]
    layer = [*mamba, product, "attend_decodes", product, product, *mlp]
    assert launched[: 2 * len(layer)] == 2 * layer


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_requests", [slow(1), 3])
def test_the_launches_of_a_delta_net_with_decays_by_channel(
    gpu_device, models, num_requests
) -> None:
    """Each of its two projections of projections is two products."""
    product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
    launched = launches_of_a_decode(gpu_device, models("kimi_linear")[1], num_requests)
    net = [*[product] * 3, "_convolve", "_delta_rule", product, product, "_gated_norm", product]
    assert launched[: len(net)] == net


@pytest.mark.slow
@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_requests", [1, 3])
def test_the_launches_of_a_lightning_attention(gpu_device, models, num_requests) -> None:
    product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
    launched = launches_of_a_decode(gpu_device, models("minimax")[1], num_requests)
    net = [product, "_activate", "_scan", "_gated_norm", product]
    first = launched.index(product)
    assert launched[first : first + len(net)] == net


A4B = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True}
E2B = {"enable_moe_block": False}
"""What makes the test's Gemma 4 like 26B-A4B, or like E2B."""


@pytest.mark.parametrize(("like", "num_requests"), [slow(A4B, 1), (E2B, 1), (A4B, 3), slow(E2B, 3)])
def test_the_layers_of_gemma4_are_launches_of_their_products(
    gpu_device, tmp_path, like, num_requests
) -> None:
    """And one for attention, for the router, and for the sums behind experts. The products that
    read the stream with a norm that is added to it are those of few rows."""
    reference = reference_model("gemma4", SCALE, **SHAPE | VARIANTS["gemma4"] | like)
    steps = GpuSteps(gpu_device, save(reference, tmp_path))
    steps.program.warm_up()
    rows = dict.fromkeys(range(num_requests), 1)
    add_prompts(steps, dict.fromkeys(rows, 9))
    steps.step(dict.fromkeys(rows, 8))
    gpu_device.launched.clear()
    for row, logits in steps.step(rows).items():
        assert_equals_transformers(logits, reference, steps.tokens[row][:-1])
    few = "multiply_few_rows"
    product = few if num_requests > 1 else "multiply_single_row"
    layer = ["attend_decodes", product, few]
    if like is A4B:
        experts = launches_of_experts(num_requests)
        layer += ["_route_rows", product, *experts, "_add_normed", product]
    else:
        layer += [product, few, product, few]
    launched = list(gpu_device.launched)
    begin = launched.index("attend_decodes")
    assert launched[begin:][: len(layer)] == layer


@pytest.mark.slow
@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_requests", [1, 3])
def test_the_layers_of_gemma3n_are_launches_of_their_products(
    gpu_device, models, num_requests
) -> None:
    """And those of streams, of the sum with the branch beside attention, and of sparse gates."""
    few = "multiply_few_rows"
    product = few if num_requests > 1 else "multiply_single_row"
    predicted = ["_rms_norm", product, "_predict"]
    branch = ["_rms_norm", "aten::add_", product, product, "_add_normed", "aten::mul_"]
    attention = [product, "attend_decodes", product]
    sparse = ["_activate_sparse", product]
    corrected = [few, "_correct", product, product, "_rms_norm", "aten::add_"]
    first = [*predicted, *branch, *attention, few, *sparse, *corrected]
    second = [*predicted, *branch, *attention, few, product, *corrected]
    launched = launches_of_a_decode(gpu_device, models("gemma3n")[1], num_requests)
    begin = launched.index("_rms_norm")
    assert launched[begin:][: len(first + second)] == first + second


@pytest.mark.parametrize(("name", "fields"), [("gemma4", E2B), slow("gemma3n", {})])
def test_inputs_of_layers_may_be_as_wide_as_the_stream(gpu_device, tmp_path, name, fields) -> None:
    shape = SHAPE | VARIANTS[name] | fields
    shape["hidden_size_per_layer_input"] = shape["hidden_size"]
    reference = reference_model(name, SCALE, **shape)
    steps = GpuSteps(gpu_device, save(reference, tmp_path))
    add_prompts(steps, {0: 11})
    for count in (11, 1):
        logits = steps.step({0: count})
        assert_equals_transformers(logits[0], reference, steps.tokens[0][:-1])


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_requests", [slow(1), 3])
def test_an_mlp_beside_experts_and_inputs_of_layers_are_launches_of_their_products(
    gpu_device, models, num_requests
) -> None:
    """The router's launch normalises what the experts read, one launch normalises and adds both
    sums, and the product behind a layer multiplies the stream by the layer's factor. The stream's
    norms are computed by products of few rows."""
    product = "multiply_single_row" if num_requests == 1 else "multiply_few_rows"
    attention = [product, "attend_decodes", product]
    mixture = ["_route_rows", product, *launches_of_experts(num_requests), "_add_normed"]
    layer = [*attention, "multiply_few_rows", *mixture, product, product]
    following = ["multiply_few_rows", *layer[1:]]
    launched = launches_of_a_decode(gpu_device, models("gemma4")[1], num_requests)
    begin = launched.index("attend_decodes") - 1
    assert launched[begin:][: 2 * len(layer)] == [*layer, *following]
    attention = Counter(each for each in launched if each.startswith(("attend", "_rope_write")))
    assert attention == {"attend_decodes": 4}, "two layers read the keys of earlier ones"


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize(
    ("num_requests", "product"), [(1, "multiply_single_row"), (3, "multiply_few_rows")]
)
@pytest.mark.parametrize("name", ["qwen3_5", slow("qwen3_next")])
def test_gates_are_part_of_a_decodes_attention(
    gpu_device, models, name, num_requests, product
) -> None:
    """A layer with gated attention is five launches, too."""
    layer = [product, "attend_decodes", *[product] * 3]
    launched = launches_of_a_decode(gpu_device, models(name)[1], num_requests)
    last = len(launched) - launched[::-1].index("_rms_norm") - 1  # behind the last layer
    if name != "qwen3_next":  # which has experts behind attention
        assert launched[last - len(layer) : last] == layer
    attention = launched.index("attend_decodes")
    assert launched[attention - 1 : attention + 2] == layer[:3]


@pytest.mark.usefixtures("launches_only")
def test_a_state_that_is_too_large_has_the_launches_of_all_steps(
    gpu_device, models, monkeypatch
) -> None:
    monkeypatch.setattr(few_delta_net, "MOST_CELLS", 1)
    launched = launches_of_a_decode(gpu_device, models("qwen3_5")[1], 1)
    assert launched[1:4] == ["_convolve", "_delta_rule", "_gated_norm"]


@pytest.mark.usefixtures("launches_only")
def test_norms_of_all_heads_are_part_of_the_attention_of_drafts(gpu_device, models) -> None:
    steps = GpuSteps(gpu_device, models("olmo2")[1], max_drafts=12, max_verified=5)
    steps.program.warm_up()
    add_prompts(steps, {0: 3})
    steps.step({0: 2})
    step = steps.prepare({0: 1}, drafts={0: [1, 2, 3, 4]})
    gpu_device.launched.clear()
    steps.run(step)
    launched, product = list(gpu_device.launched), "multiply_few_rows"
    attention = launched.index("attend_decodes")
    assert launched[attention - 1 : attention + 2] == [product, "attend_decodes", product]


@pytest.mark.usefixtures("launches_only")
@pytest.mark.parametrize("num_reqs", [1, 3])
def test_a_step_that_verifies_drafts_is_one_launch_of_attention_a_layer(
    gpu_device, models, num_reqs
) -> None:
    """With splits, and without. A step of up to eight tokens is five launches a layer."""
    steps = GpuSteps(gpu_device, models("llama")[1], max_drafts=12, max_verified=5)
    steps.program.warm_up()
    add_prompts(steps, dict.fromkeys(range(num_reqs), 3))
    steps.step(dict.fromkeys(range(num_reqs), 2))
    drafts = {row: [1, 2, 3, 4] for row in range(num_reqs)}
    step = steps.prepare(dict.fromkeys(range(num_reqs), 1), drafts=drafts)
    gpu_device.launched.clear()
    steps.run(step)
    counts = Counter(gpu_device.launched)
    assert counts["attend_decodes"] == 2
    assert not counts["_rope_write"] + counts["attend"] + counts["merge_splits"]
    if num_reqs == 1:
        launched, layer = list(gpu_device.launched), ["multiply_few_rows"] * 5
        layer[1] = "attend_decodes"
        first = launched.index("_rope_tables") + 1
        assert launched[first:][: 2 * len(layer)] == 2 * layer


@pytest.mark.usefixtures("launches_only")
def test_small_steps_are_split_and_warm_up_runs_all_their_variants(
    gpu_device, models, monkeypatch
) -> None:
    """Each number of splits is a kernel variant, and no request should wait for its compilation."""
    found: list[tuple[int, bool]] = []

    def note(*_, num_splits, masks_all=True, **__) -> None:
        found.append((num_splits, masks_all))

    for name in ("paged_attention", "decode_attention"):
        monkeypatch.setattr(attention, name, note)
    steps = GpuSteps(gpu_device, models("llama")[1])
    steps.program.warm_up()
    warm = set(found)
    add_prompts(steps, {0: 24, 1: 1, 2: 1, 3: 6})
    used = []
    for work in ({0: 1}, {1: 1, 0: 1}, {1: 1, 0: 1, 2: 1}, {3: 2}, {3: 2, 0: 1}, {0: 20}):
        steps.run(steps.prepare(work))
        used.append(found[-1])
    assert used[:3] == [(4, True), (2, True), (1, True)]
    assert used[3:] == [(4, False), (2, False), (1, False)]
    assert warm == set(used)


@pytest.mark.slow
def test_a_step_may_be_limited_to_one_token(gpu_device, models) -> None:
    reference, directory = models("llama")
    steps = GpuSteps(gpu_device, directory, "FULL", None, max_tokens=1, max_requests=2)
    assert steps.program.capture().num_graphs == 1
    add_prompts(steps, {1: 2})
    steps.step({1: 1})
    logits = steps.step({1: 1})[1]
    assert_equals_transformers(logits, reference, steps.tokens[1][:-1])


@pytest.mark.usefixtures("launches_only")
def test_a_failed_capture_is_a_start_error(gpu_device, models, monkeypatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    steps = GpuSteps(gpu_device, models("llama")[1], "PIECEWISE", (2,))
    monkeypatch.setattr(gpu_device, "end_capture", fail)
    with pytest.raises(EngineStartError, match=r"PIECEWISE graph of 2 tokens .* out of memory; "):
        steps.program.capture()


@pytest.mark.parametrize(
    ("changes", "quantization", "message"),
    [
        ({}, "int8", r"quantization='int8' is for the CPU: leave it out, or .* device='cpu'"),
        (
            {"head_dim": 576, "rope": RopeConfig(rotary_dim=576)},
            None,
            r"heads of 576 elements .* device='cpu'",
        ),
    ],
)
def test_a_model_without_kernels_is_refused(models, changes, quantization, message) -> None:
    directory = models("llama")[1]
    config = ModelConfig.from_directory(directory)
    layer = config.layers[0]
    layer = replace(layer, mixer=replace(layer.mixer, **changes))
    load = LoadConfig(str(directory), quantization=quantization)
    with pytest.raises(EngineStartError, match=message):
        check_model(replace(config, layers=(layer,) * config.num_layers), load, "float32")


def test_the_cache_takes_the_bytes_that_are_computed(gpu_device, models) -> None:
    config = ModelConfig.from_directory(models("llama")[1])
    dtype = torch.float16
    shape = cache_shape(config, 3, lambda heads: block_bytes(heads, 3, dtype))
    num_bytes = cache_bytes(shape, dtype, num_blocks=5)
    cache = GpuKVCache(config, dtype, shape, 5, gpu_device.make_arena(num_bytes, "the cache"))
    sizes = {part.nbytes for _, *parts in cache.layers.values() for part in parts}
    assert sizes == {5 * shape.buffer_bytes // 2}
    with pytest.raises(AssertionError, match="too small"):
        GpuKVCache(config, dtype, shape, 5, gpu_device.make_arena(num_bytes - 64, "the cache"))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode.name for mode in CudaGraphMode])
@pytest.mark.parametrize("name", VARIANTS)
def test_random_steps_at_the_default_sizes(gpu_device, models, name, mode) -> None:
    reference, directory = models(name)
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    chance = random.Random(seed)
    gpu_device.progress = chance.choice([lazy, eager, lambda queued: chance.randrange(3)])
    steps = GpuSteps(gpu_device, directory, mode)
    steps.program.capture()
    for round_ in range(2):
        add_prompts(steps, {row: chance.randrange(1, 40) for row in range(4)}, round_)
        while any(len(tokens) < 48 for tokens in steps.tokens.values()):
            work = random_work(steps, chance)
            for row, logits in steps.step(work).items():
                assert_equals_transformers(logits, reference, steps.tokens[row][:-1])


def random_work(steps: GpuSteps, chance: random.Random) -> dict[int, int]:
    """Choose some tokens, at most 24, of some of the rows that have fewer than 48 tokens."""
    rows = [row for row, tokens in steps.tokens.items() if len(tokens) < 48]
    work, budget = {}, 24
    for row in chance.sample(rows, chance.randint(1, len(rows))):
        waiting = len(steps.tokens[row]) - steps.computed[row]
        count = min(chance.choice([waiting, chance.randint(1, waiting)]), budget)
        if count:
            work[row] = count
            budget -= count
    return work


def test_a_layer_behind_joins_embeddings_and_hidden_states(gpu_device, models) -> None:
    steps = GpuSteps(gpu_device, models("deepseek_v3")[1])
    config, where = steps.model.config, gpu_device.torch_device
    config = replace(config, further_layers=config.layers[-1:], num_further=1)
    drawn = lambda shape, dtype: torch.randn(shape, dtype=dtype, device=where)  # noqa: E731
    layer = FurtherLayer(config, config.num_layers, Storage(drawn, torch.float32))
    buffers = GpuBuffers(config, torch.float32, 24, 4, 4, gpu_device)
    computed_by = GpuOps(config, steps.cache, steps.inputs, buffers, where)
    norms = layer.embedding_norm, layer.hidden_norm
    embeds, hidden = buffers.hidden[:5].normal_(), drawn((5, config.hidden_size), torch.float32)
    parts = [
        rms_norm(x.cpu(), norm.weight.cpu(), norm.spec.eps)
        for x, norm in zip((embeds, hidden), norms, strict=True)
    ]
    want = torch.cat(parts, 1) @ layer.projection.weight.cpu().T
    found = computed_by.join(embeds, hidden, norms, layer.projection)
    gpu_device.synchronize()
    assert found.data_ptr() == buffers.hidden.data_ptr(), "the residual stream"
    torch.testing.assert_close(found.cpu(), want, atol=1e-4, rtol=1e-4)
