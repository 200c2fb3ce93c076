"""Send one long prompt several times and print how many of its tokens come from the prefix cache.

Only full blocks are cached, and the last token is always computed. Prompts with different
`cache_salt`s share no blocks, so one tenant cannot find out the prompts of another one.
"""

from shmllm import LLM, SamplingParams

PREFIX = "import os\nimport sys\n\n\ndef main(argv):\n    arguments = list(argv)\n" * 6
params = SamplingParams(temperature=0, max_tokens=8)

with LLM() as llm:
    prompts = {
        "first time": PREFIX,
        "again": PREFIX,
        "with another ending": PREFIX + "    return len(arguments)\n",
        "with another salt": {"prompt": PREFIX, "cache_salt": "another tenant"},
    }
    for name, prompt in prompts.items():
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        cached, total = output.num_cached_tokens, len(output.prompt_token_ids)
        print(f"{name}: {cached} of {total} prompt tokens cached")

    llm.reset_prefix_cache()
    output = llm.generate(PREFIX, params, use_tqdm=False)[0]
    print(f"after a reset: {output.num_cached_tokens} cached")
