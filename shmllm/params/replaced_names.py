"""Options that vLLM had under other names, and what to do instead.

`reject_unknown_options` tells it to a user who gives one of them.
"""

from __future__ import annotations

_CONSTRAINT = "use structured_outputs=StructuredOutputsParams({}=...)"
_GRAPHS = 'use compilation_config={"max_cudagraph_capture_size": ...}'
_OVERRIDES = "change config.json in a copy of the model's directory"
_SPECULATION = 'use speculative_config={"method": ..., "num_speculative_tokens": ...}'

REPLACED_NAMES = {
    # of SamplingParams
    "best_of": "use n, and choose among the outputs by cumulative_logprob",
    "use_beam_search": "use LLM.beam_search",
    "length_penalty": "use LLM.beam_search with BeamSearchParams(length_penalty=...)",
    "early_stopping": "use LLM.beam_search",
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(...)",
    "guided_json": _CONSTRAINT.format("json"),
    "guided_json_object": _CONSTRAINT.format("json_object"),
    "guided_regex": _CONSTRAINT.format("regex"),
    "guided_choice": _CONSTRAINT.format("choice"),
    "guided_grammar": _CONSTRAINT.format("grammar"),
    "guided_whitespace_pattern": _CONSTRAINT.format("whitespace_pattern"),
    "truncate_prompt_tokens": "truncate the prompt before the call",
    "logits_processors": "name their classes in LLM(logits_processors=[...])",
    # of LLM
    "max_context_len_to_capture": _GRAPHS,
    "max_seq_len_to_capture": _GRAPHS,
    "cuda_graph_sizes": 'use compilation_config={"cudagraph_capture_sizes": ...}',
    "speculative_model": _SPECULATION,
    "num_speculative_tokens": _SPECULATION,
    "num_lookahead_slots": _SPECULATION,
    "rope_scaling": _OVERRIDES,
    "rope_theta": _OVERRIDES,
    "disable_async_output_proc": "use async_scheduling",
    "num_scheduler_steps": "use async_scheduling",
    "use_v2_block_manager": "there is one block manager",
    "worker_use_ray": "the engine starts its processes by itself; use tensor_parallel_size",
    "preemption_mode": "preempted requests are recomputed",
}
"""What to do instead, by the old name; it follows a semicolon in the error."""
