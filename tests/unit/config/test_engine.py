"""EngineConfig and EngineInfo: valid values, error messages, and JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support.fakes import info

from shmllm.config.engine import CacheConfig, EngineConfig, LogprobsConfig, SchedulerConfig
from shmllm.config.graphs import GraphConfig
from shmllm.config.info import EngineInfo
from shmllm.config.load import LoadConfig
from shmllm.config.lora import LoraConfig
from shmllm.config.parallel import ParallelConfig
from shmllm.config.plugins import PluginConfig
from shmllm.config.shared_kv import SharedKVConfig
from shmllm.config.speculative import SpeculativeConfig
from shmllm.errors import EngineStartError


def test_names_of_a_text_may_have_blanks_around_them() -> None:
    assert LoraConfig(target_modules="q_proj, v_proj ,q_proj").target_modules == (
        "q_proj",
        "v_proj",
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LoadConfig("m", dtype="float64"), "dtype 'float64' is not one of auto, float32"),
        (lambda: LoadConfig("m", load_format="gguf"), "load_format 'gguf' is not one of auto"),
        (lambda: LoadConfig("m", model_impl="vllm"), "model_impl 'vllm' is not one of auto, shml"),
        (
            lambda: LoadConfig("m", quantization="hqq"),
            "quantization 'hqq' is not one of None, int8, int4, int4-g64, auto-round",
        ),
        (
            lambda: LoadConfig("m", activation_dtype="int4"),
            "activation_dtype 'int4' is not one of auto, float32, bfloat16, int16, int8",
        ),
        (lambda: LoadConfig("m", max_model_len=0), "max_model_len must be .* at least 1, got 0"),
        (lambda: LoadConfig("m", max_model_len=1.5), "max_model_len must be .* got 1.5"),
        (
            lambda: CacheConfig(block_size=12),
            r"block_size must be one of \(8, 16, 32, 64, 128\), got 12",
        ),
        (lambda: CacheConfig(memory_bytes=0), "kv_cache_memory_bytes must be .* got 0"),
        (lambda: CacheConfig(memory_bytes=2**63), r"below 2\*\*63, .* got 9223372036854775808"),
        (lambda: SchedulerConfig(max_num_seqs=2**31), "at most 2,147,483,647, got 2147483648"),
        (lambda: CacheConfig(memory_bytes="1X"), "kv_cache_memory_bytes must be .* got '1X'"),
        (lambda: SchedulerConfig(max_num_seqs=0), "max_num_seqs must be .* got 0"),
        (lambda: SchedulerConfig(max_num_seqs=True), "max_num_seqs must be .* got True"),
        (lambda: SchedulerConfig(max_num_batched_tokens=-1), "max_num_batched_tokens must be"),
        (lambda: EngineConfig(LoadConfig("m"), num_threads=0), "num_threads must be .* got 0"),
        (
            lambda: EngineConfig(LoadConfig("m"), device="gpu"),
            "device 'gpu' is not one of auto, cpu",
        ),
        (lambda: EngineConfig(LoadConfig("m"), device="cuda:x"), "device 'cuda:x' is not one of"),
        (
            lambda: CacheConfig(gpu_memory_utilization=0),
            "gpu_memory_utilization .* above 0 .* got 0",
        ),
        (lambda: CacheConfig(gpu_memory_utilization=1.01), "at most 1, got 1.01"),
        (lambda: CacheConfig(gpu_memory_utilization="0.5"), "gpu_memory_utilization .* got '0.5'"),
        (lambda: SchedulerConfig(async_scheduling="yes"), "async_scheduling must be .* got 'yes'"),
        (lambda: SchedulerConfig(long_prefill_token_threshold=-1), "threshold must be .* got -1"),
        (lambda: LoraConfig(target_modules=[]), r"lora_target_modules must be a list .* got \[\]"),
        (lambda: LoraConfig(target_modules=["a", 1]), r"must be a list of names, got \['a', 1\]"),
        (lambda: LoraConfig(target_modules="a,"), "must be a list of names, got 'a,'"),
        (lambda: LoraConfig(target_modules="a, ,b"), "must be a list of names, got 'a, ,b'"),
        (lambda: CacheConfig(num_blocks=1), "num_gpu_blocks_override must be .* got 1"),
        (lambda: LoadConfig("m", max_model_len=-2), "max_model_len must be .* got -2"),
        (lambda: SchedulerConfig(async_scheduling=1), "async_scheduling must be .* got 1"),
        (lambda: GraphConfig("SOME"), "cudagraph_mode 'SOME' is not one of NONE, PIECEWISE, FULL"),
        (lambda: GraphConfig(capture_sizes=(1, 0)), r"capture_sizes must be .* got \[1, 0\]"),
        (lambda: GraphConfig(capture_sizes=()), r"capture_sizes must be .* got \[\]"),
        (lambda: GraphConfig(max_capture_size=0), "max_cudagraph_capture_size must be .* got 0"),
        (lambda: GraphConfig("FULL", (1, 8), 16), "16 is not the largest of .*, 8; give one"),
        (
            lambda: PluginConfig(kv_connector="a:"),
            "kv_connector must be 'module:Class' or the name",
        ),
        (lambda: PluginConfig(kv_connector=1), "kv_connector must be .* got 1"),
        (lambda: PluginConfig(kv_role="both"), "kv_role 'both' is not one of kv_both, kv_producer"),
        (lambda: PluginConfig(kv_connector_extra_config="{"), "extra_config is no JSON"),
        (lambda: PluginConfig(kv_connector_extra_config={1: {2}}), "extra_config is no JSON"),
        (lambda: PluginConfig(kv_connector_extra_config=[1]), r"must be a mapping, got \[1\]"),
        (lambda: GraphConfig(enforce_eager=1), "enforce_eager must be True or False, got 1"),
    ],
)
def test_the_error_for_an_invalid_value_has_the_option_and_the_value(make, words):
    with pytest.raises(EngineStartError, match=words):
        make()


RANKS, STAGES = ParallelConfig(2), ParallelConfig(pipeline_parallel_size=3)
TRANSFORMERS = LoadConfig("m", model_impl="transformers")
DRAFTS = SpeculativeConfig("draft_model", model="d")
NGRAM = SpeculativeConfig("ngram")
MTP = SpeculativeConfig("mtp")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"load": TRANSFORMERS}, "model_impl='transformers'"),
        ({"parallel": RANKS}, "tensor_parallel_size 2"),
        ({"parallel": STAGES}, "pipeline_parallel_size 3"),
        ({"cache": CacheConfig(enable_prefix_caching=False)}, "enable_prefix_caching=False"),
        ({"shared_kv": SharedKVConfig(2**20)}, "shared_kv_cache_bytes"),
    ],
)
def test_what_a_connector_cannot_be_together_with_is_refused(options, words):
    message = f"kv_connector is not possible with {words}: leave one of the two out"
    plugins = PluginConfig(kv_connector="a:B")
    with pytest.raises(EngineStartError, match=message):
        EngineConfig(**{"load": LoadConfig("m"), "plugins": plugins} | options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"load": dataclasses.replace(TRANSFORMERS, decode_kernel="persistent")},
            "model_impl='transformers'",
        ),
        ({"parallel": RANKS}, "tensor_parallel_size 2"),
        ({"lora": LoraConfig(True)}, "enable_lora"),
        ({"graphs": GraphConfig("PIECEWISE")}, "cudagraph_mode PIECEWISE"),
        ({"graphs": GraphConfig("FULL")}, "cudagraph_mode FULL"),
    ],
)
def test_what_all_layers_in_one_kernel_cannot_be_together_with_is_refused(options, words):
    message = f"decode_kernel='persistent' is not possible with {words}: leave one of the two out"
    load = LoadConfig("m", decode_kernel="persistent")
    with pytest.raises(EngineStartError, match=f"^{message}$"):
        EngineConfig(**{"load": load} | options)
    EngineConfig(load, graphs=GraphConfig("NONE"))


def test_a_draft_model_reads_no_shared_block_in_place() -> None:
    drafts = SpeculativeConfig("draft_model", model="d")
    for reads in ("auto", "copy"):
        shared = SharedKVConfig(2**20, reads)
        assert EngineConfig(LoadConfig("m"), shared_kv=shared, speculative=drafts).copies_hits
    with pytest.raises(EngineStartError, match="'in_place' is not possible with a draft model"):
        EngineConfig(
            LoadConfig("m"), shared_kv=SharedKVConfig(2**20, "in_place"), speculative=drafts
        )


def test_ranks_share_blocks_and_stages_do_not() -> None:
    shared = SharedKVConfig(2**20)
    EngineConfig(LoadConfig("m"), shared_kv=shared, parallel=RANKS)
    message = "shared_kv_cache_bytes is not possible with pipeline_parallel_size 3: leave one of"
    with pytest.raises(EngineStartError, match=message):
        EngineConfig(LoadConfig("m"), shared_kv=shared, parallel=STAGES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"load": TRANSFORMERS, "parallel": RANKS}, "model_impl='transformers'"),
        ({"load": TRANSFORMERS, "parallel": STAGES}, "model_impl='transformers'"),
        ({"speculative": DRAFTS, "parallel": STAGES}, "the speculative method 'draft_model'"),
        ({"speculative": MTP, "parallel": STAGES}, "the speculative method 'mtp'"),
        ({"speculative": NGRAM, "parallel": STAGES}, "the speculative method 'ngram'"),
        ({"lora": LoraConfig(True), "parallel": STAGES}, "enable_lora"),
        (
            {"scheduler": SchedulerConfig(async_scheduling=True), "parallel": STAGES},
            "async_scheduling",
        ),
    ],
)
def test_what_several_processes_cannot_do_is_refused(options, words):
    option = options["parallel"].option
    message = f"{words} is not possible with {option}: leave one of the two out"
    with pytest.raises(EngineStartError, match=message):
        EngineConfig(**{"load": LoadConfig("m")} | options)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative": NGRAM, "lora": LoraConfig(True), "parallel": RANKS},
        {"scheduler": SchedulerConfig(async_scheduling=True), "parallel": RANKS},
        {"scheduler": SchedulerConfig(async_scheduling=False), "parallel": STAGES},
    ],
)
def test_what_several_processes_can_do_is_accepted(options):
    assert EngineConfig(LoadConfig("m"), **options).parallel.num_processes > 1


def test_ranks_and_stages_together_are_refused():
    message = "tensor_parallel_size 2 and pipeline_parallel_size 3 are not possible together: leave"
    with pytest.raises(EngineStartError, match=message):
        ParallelConfig(2, 3)


@pytest.mark.parametrize("size", [0, 65, True])
def test_a_number_of_processes_has_bounds(size):
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(EngineStartError, match=f"{option} must be .* got {size}"):
            ParallelConfig(**{option: size})


FULL = EngineConfig(
    LoadConfig(
        "/größe",
        "bfloat16",
        "dummy",
        7,
        512,
        "/tokenizers/größe",
        "int8",
        "float32",
        "tiles",
        "int8",
        True,
        "größe",
        further_layers=1,
        kept_levels=(2, 5),
        model_impl="transformers",
        runner="pooling",
        convert="embed",
        hf_overrides={"num_labels": 3},
        language_model_only=True,
        decode_kernel="launches",
        disable_sliding_window=True,
    ),
    CacheConfig(32, 12345, False, 0.5, 40, True, 64),
    SchedulerConfig(3, 99, "priority", False, 7, False, 0.25),
    lora=LoraConfig(target_modules=("q_proj",)),
    graphs=GraphConfig("FULL", (1, 2, 8), 8, True),
    plugins=PluginConfig(
        ("größe:Own",), "größe.Own", "", {"größe": [1]}, "kv_consumer", ("/größe",)
    ),
    num_threads=2,
    device="cuda:1",
)


CONNECTED = EngineConfig(LoadConfig("m"), plugins=PluginConfig(kv_connector="größe:Own"))


@pytest.mark.parametrize(
    "config",
    [EngineConfig(LoadConfig("m")), FULL, CONNECTED],
    ids=["defaults", "full", "with a connector"],
)
def test_a_configuration_can_be_sent_as_json(config):
    assert EngineConfig.from_json(config.to_json()) == config


def test_every_field_of_the_full_configuration_differs_from_its_default():
    default = dataclasses.asdict(EngineConfig(LoadConfig("m")))
    full = dataclasses.asdict(FULL)
    excluded = {"load": ["returns_experts"], "plugins": ["kv_connector"]}  # by others of FULL
    for part in ("load", "cache", "scheduler", "graphs", "plugins"):
        equal = [name for name in full[part] if full[part][name] == default[part][name]]
        assert equal == excluded.get(part, [])


def test_masks_need_the_log_probabilities_of_their_tokens():
    with pytest.raises(
        EngineStartError, match="return_sampling_mask needs logprobs_mode='processed"
    ):
        EngineConfig(LoadConfig("m"), logprobs=LogprobsConfig(returns_masks=True))


@pytest.mark.parametrize("given", [None, -1, "auto"])
def test_the_length_of_the_model_has_three_names(given):
    assert LoadConfig("m", max_model_len=given).max_model_len is None


def test_a_number_of_blocks_counts_before_a_number_of_bytes():
    def bytes_for(num_blocks):
        return 100 * num_blocks

    assert CacheConfig().given_bytes(bytes_for) is None
    assert CacheConfig(memory_bytes=950).given_bytes(bytes_for) == 950
    assert CacheConfig(memory_bytes=950, num_blocks=4).given_bytes(bytes_for) == 400


def test_a_configuration_from_json_is_checked():
    parts = json.loads(FULL.to_json())
    parts["cache"]["block_size"] = 5
    with pytest.raises(EngineStartError, match="block_size"):
        EngineConfig.from_json(json.dumps(parts))


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.cache.block_size = 8


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "eos_token_ids": (1, 2),
            "logits_processors": ("a:B",),
            "warnings": ("short of memory", "é"),
            "device": "NVIDIA H200",
        },
    ],
)
def test_engine_info_can_be_sent_as_json(changes):
    sent = info(**changes)
    assert EngineInfo.from_json(sent.to_json()) == sent


def test_unknown_fields_of_engine_info_are_ignored():
    values = json.loads(info().to_json()) | {"unknown": 1}
    assert EngineInfo.from_json(json.dumps(values)) == info()
