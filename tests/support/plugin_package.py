"""Builds a package with plugins of every kind and installs it into a directory, as pip does."""

from __future__ import annotations

from pathlib import Path

FAMILY = """
from shmllm.models.families.llama import configure
"""
GENERAL = """
def register():
    from shmllm.models.registry import register_model
    register_model("CopyForCausalLM", "shmllm_test_plugins.family")

def register_for_vllm():
    from vllm import ModelRegistry
    ModelRegistry.register_model("OtherCopyForCausalLM", "shmllm_test_plugins.family")
    ModelRegistry.register_model("TheirsForCausalLM", "shmllm_test_plugins.general:register")

def fail():
    raise RuntimeError("two\\nlines")
"""
PROCESSORS = '''
import torch
from shmllm.plugins.logits_processor import AdapterLogitsProcessor, LogitsProcessor

class Count(AdapterLogitsProcessor):
    """Makes the output of a request count up from its extra argument "count"."""

    @classmethod
    def validate_params(cls, params):
        first = (params.extra_args or {}).get("count", 0)
        if not isinstance(first, int):
            raise ValueError(f"count must be an int, got {first!r}")

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        arguments = params.extra_args or {}
        if arguments.get("fails_at_first"):
            raise ValueError("no such request")
        if "count" not in arguments:
            return None

        def count(output, logits):
            if len(output) == arguments.get("fails_at"):
                raise ValueError("no further")
            changed = torch.full_like(logits, -torch.inf)
            changed[arguments["count"] + len(output)] = 0
            return changed

        return count

class Identity(LogitsProcessor):
    """Changes nothing, for a whole batch."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.vocab_size = vllm_config.model_config.get_vocab_size()

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        assert logits.shape[1] == self.vocab_size
        return logits
'''
FOR_VLLM = '''
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

class Second(AdapterLogitsProcessor):
    """Forces the second prompt token, where asked, with the form of function that gets prompts."""

    def is_argmax_invariant(self):
        from vllm import SamplingParams  # plugins may import when they are called
        return SamplingParams is None

    def new_req_logits_processor(self, params):
        if not (params.extra_args or {}).get("second"):
            return None

        def force(prompt, output, logits):
            logits[prompt[1]] = 1e9
            return logits

        return force
'''
OTHERS = '''
import json, os
from shmllm.plugins.io_processor import IOProcessor
from shmllm.plugins.stat_logger import StatLoggerBase

class FileLogger(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        self.path = os.environ.get("SHMLLM_TEST_STATISTICS", os.devnull)
        self.length = vllm_config.model_config.max_model_len

    def write(self, **record):
        with open(self.path, "a") as file:
            print(json.dumps(record), file=file)

    def log_engine_initialized(self):
        self.write(length=self.length)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.write(generated=iteration_stats.num_generation_tokens,
                   steps=scheduler_stats.step_counter)

    def record_sleep_state(self, is_awake, level):
        self.write(sleep=[is_awake, level])

class Lines(IOProcessor):
    """Prompts are lines, and the result is a list of texts."""

    def parse_data(self, data):
        if not isinstance(data, str):
            raise ValueError("the data must be a text")
        return data

    def pre_process(self, prompt, request_id=None, **kwargs):
        return prompt.splitlines()

    def post_process(self, model_output, request_id=None, **kwargs):
        return [len(o.prompt_token_ids) for o in model_output]

def lines():
    return "shmllm_test_plugins.others.Lines"
'''
ENTRY_POINTS = """
[shmllm.general_plugins]
copy = shmllm_test_plugins.general:register
failing = shmllm_test_plugins.general:fail
missing = shmllm_test_plugins.absent:nothing

[shmllm.logits_processors]
count = shmllm_test_plugins.processors:Count
identity = shmllm_test_plugins.processors:Identity
no_class = shmllm_test_plugins.general:register

[shmllm.stat_logger_plugins]
file = shmllm_test_plugins.others:FileLogger

[shmllm.io_processor_plugins]
lines = shmllm_test_plugins.others:lines

[vllm.general_plugins]
other_copy = shmllm_test_plugins.general:register_for_vllm

[vllm.logits_processors]
second = shmllm_test_plugins.for_vllm:Second
"""
METADATA = "Metadata-Version: 2.1\nName: shmllm-test-plugins\nVersion: 1.0\n"


def install_plugins(target: Path) -> None:
    """Write the package and its metadata into a directory of `sys.path`."""
    package = target / "shmllm_test_plugins"
    package.mkdir()
    modules = {
        "__init__": "",
        "family": FAMILY,
        "general": GENERAL,
        "processors": PROCESSORS,
        "for_vllm": FOR_VLLM,
        "others": OTHERS,
    }
    for name, source in modules.items():
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    metadata = target / "shmllm_test_plugins-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA, encoding="utf-8")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
