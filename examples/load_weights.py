"""Change the model of a running engine: what a trainer does between two steps.

New weights are staged and checked, and then put in force between two steps, all of them or none;
the prefix cache is emptied, and every output says which weights it came from.
"""

from shmllm import LLM, RequestError, SamplingParams

PROMPT = "import os\nimport sys\n"
greedy = SamplingParams(temperature=0, max_tokens=16)


def complete(llm):
    output = llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0]
    print(f"version {output.weight_versions[0].version}: {output.text!r}")
    return output.text


with LLM() as llm:
    before = complete(llm)
    names = llm.collective_rpc("list_weights")[0]
    weights = {name: llm.collective_rpc("get_weight", args=(name,))[0] for name in names}

    llm.update_weights((name, weight * 0.6) for name, weight in weights.items())
    complete(llm)

    try:
        norm = weights["model.norm.weight"]
        llm.update_weights({"model.norm.weight": norm[:3], "model.norm.bias": norm})
    except RequestError as error:
        print("refused:", error)

    llm.start_weight_update()  # the same in parts: nothing changes before the end
    for part in ("embed", "layers", "norm"):
        llm.update_weights({name: weights[name] for name in names if f"model.{part}" in name})
    llm.finish_weight_update(version="as loaded")
    print("back to what it was:", complete(llm) == before)
