"""Generate outputs that match a JSON schema, a regular expression, choices or a grammar."""

import json

from shmllm import LLM, RequestError, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "languages": {"type": "array", "items": {"enum": ["C", "Python", "Rust"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SUM = """
root   ::= number (" + " number){1,3}
number ::= [1-9] [0-9]{0,2}
"""


def sampling(constraint: StructuredOutputsParams) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=1, max_tokens=200, structured_outputs=constraint)


def main() -> None:
    constraints = {
        # A pydantic model is also accepted: json=Person.
        "json": StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
        "regex": StructuredOutputsParams(regex=r"\d{4}-(0[1-9]|1[0-2])-[0-2]\d"),
        "choice": StructuredOutputsParams(choice=["positive", "negative", "neutral"]),
        "grammar": StructuredOutputsParams(grammar=SUM),
    }
    with LLM(model="tiny") as llm:
        # A batch may mix constraints, and requests without constraints.
        params = [sampling(constraint) for constraint in constraints.values()]
        outputs = llm.generate(["# The answer:\n"] * len(params), params, use_tqdm=False)
        for kind, output in zip(constraints, outputs, strict=True):
            print(f"{kind:8}", output.outputs[0].text, output.outputs[0].finish_reason)
        print(json.loads(outputs[0].outputs[0].text)["age"])

        # A constraint that cannot be enforced is refused before any request is queued.
        try:
            llm.generate("x", sampling(StructuredOutputsParams(json={"uniqueItems": True})))
        except RequestError as error:
            print(error)


if __name__ == "__main__":
    main()
