"""Replace the weights of a running engine, as a trainer does between two steps.

The engine stages and checks the new weights, and then replaces all of them or none between two
steps. It empties the prefix cache, and every output names the version of the weights that generated
it.
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

    llm.start_weight_update()  # an update in parts: the weights change only at its end
    for part in ("embed", "layers", "norm"):
        llm.update_weights({name: weights[name] for name in names if f"model.{part}" in name})
    llm.finish_weight_update(version="as loaded")
    print("same text as at the start:", complete(llm) == before)
