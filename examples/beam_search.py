"""Search for the most likely continuations of a prompt with beam search.

The score of a sequence is the sum of its log-probabilities, divided by its length to the power of
`length_penalty`; with 0 it is the sum itself.
"""

from shmllm import LLM, BeamSearchParams, SamplingParams

PROMPT = "def add(a, b):\n"
params = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=0.0)

with LLM() as llm:
    (output,) = llm.beam_search([PROMPT], params)
    greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    (alone,) = llm.generate([PROMPT], greedy, use_tqdm=False)

for sequence in output.sequences:
    print(f"{sequence.cum_logprob:8.3f}  {sequence.text[len(PROMPT) :]!r}")
completion = alone.outputs[0]
print(f"{completion.cumulative_logprob:8.3f}  {completion.text!r} (greedy)")
