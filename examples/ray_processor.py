"""Use Ray's processor for vLLM with engines of shmllm.

Pass the directory of a chat model as an argument; the bundled
model writes text that looks like Python.
"""

import sys

try:
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig
except ImportError as error:
    sys.exit(f"ray_processor.py needs Ray: pip install 'ray[data]' ({error})")

from shmllm.frontend.model_files import resolve_model

CORES_PER_ENGINE = 1

# Each Ray worker is a separate process, in which `import vllm` has to find shmllm.
ray.init(runtime_env={"worker_process_setup_hook": "shmllm.compat.vllm.install"})

config = vLLMEngineProcessorConfig(
    model_source=str(resolve_model(sys.argv[1] if len(sys.argv) > 1 else "tiny")),
    engine_kwargs={"num_threads": CORES_PER_ENGINE, "kv_cache_memory_bytes": 2**27},
    placement_group_config={
        "bundles": [{"CPU": CORES_PER_ENGINE}]
    },  # by default Ray asks for a GPU
    tokenize_stage=False,  # the engine's front end tokenizes and detokenizes
    detokenize_stage=False,
    concurrency=1,
    batch_size=32,
)
processor = build_processor(
    config,
    preprocess=lambda row: {
        "messages": [{"role": "user", "content": row["question"]}],
        "sampling_params": {"temperature": 0, "max_tokens": 16},
    },
    postprocess=lambda row: {"question": row["question"], "answer": row["generated_text"]},
)
questions = ray.data.from_items([{"question": f"Add {n} to a number."} for n in range(40)])
for row in processor(questions).take_all():
    print(row)
