"""Change the model of a running engine: what a trainer does between two steps.

The new weights are checked first and then written between two steps, all of them or none;
the prefix cache is emptied. Functions run in the engine and see the model itself.
"""

from shmllm import LLM, RequestError, SamplingParams

PROMPT = "import os\nimport sys\n"
greedy = SamplingParams(temperature=0, max_tokens=16)


def norm_of_weights(model):
    return sum(float(views[0].square().sum()) for views in model.named_weights().values()) ** 0.5


def complete(llm):
    return llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].text


with LLM() as llm:
    before = complete(llm)
    print(f"norm {llm.apply_model(norm_of_weights)[0]:.2f}: {before!r}")

    names = llm.collective_rpc("list_weights")[0]
    weights = {name: llm.collective_rpc("get_weight", args=(name,))[0] for name in names}
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    written = model.load_weights((name, weight * 0.9) for name, weight in weights.items())
    print(f"{len(written)} weights written")
    print(f"norm {llm.apply_model(norm_of_weights)[0]:.2f}: {complete(llm)!r}")

    try:
        model.load_weights([("model.norm.weight", weights["model.norm.weight"][:3])])
    except RequestError as error:
        print("refused:", error)

    model.load_weights(weights.items())
    print("back to what it was:", complete(llm) == before)
