"""Reinforcement learning without a framework: the model learns to write functions that return.

Each step samples with the engine, scores the completions, steps the policy, a plain model of
transformers, and sends its weights to the engine. All weights change between two steps of the
engine, and each completion names the version that generated it.
"""

import argparse
import time

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from shmllm import LLM, SamplingParams
from shmllm.frontend.model_files import resolve_model

NAMES = ["average", "count", "largest", "reverse"]
PROMPTS = [f"def {name}(values):\n" for name in NAMES]
NUM_SAMPLES = 8  # of each prompt


def reward(text):
    """1 for a text that returns something in its second line at the latest."""
    return float(any(line.strip().startswith("return ") for line in text.split("\n")[:2]))


def sample(llm):
    """Returns token ids, which of them were sampled, their log-probabilities, and the texts."""
    params = SamplingParams(n=NUM_SAMPLES, temperature=1, max_tokens=16, logprobs=0)
    ids, mask, logprobs, texts = [], [], [], []
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        prompt = output.prompt_token_ids
        for completion in output.outputs:
            tokens = completion.token_ids
            pairs = zip(tokens, completion.logprobs, strict=True)
            found = [of_place[token].logprob for token, of_place in pairs]
            ids.append(torch.tensor(prompt + tokens))
            mask.append(torch.tensor([0.0] * len(prompt) + [1.0] * len(tokens)))
            logprobs.append(torch.tensor([0.0] * len(prompt) + found))
            texts.append(completion.text)
    return *(pad_sequence(each, batch_first=True) for each in (ids, mask, logprobs)), texts


def advantages(rewards):
    """How much better each completion is than the others of its prompt, as in GRPO."""
    groups = torch.tensor(rewards).view(-1, NUM_SAMPLES)
    deviation = groups - groups.mean(1, keepdim=True)
    return (deviation / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=16)
num_steps = parser.parse_args().steps

directory = resolve_model("tiny")
policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, weight_decay=0)
print("step  reward  difference  seconds")
with LLM("tiny", dtype="float32", logprobs_mode="processed_logprobs", seed=0) as llm:
    for step in range(1, num_steps + 1):
        began = time.monotonic()
        ids, mask, sampled, texts = sample(llm)
        rewards = [reward(text) for text in texts]
        logits = policy(ids).logits[:, :-1]
        current = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        change = (current - sampled[:, 1:]) * mask[:, 1:]  # 0 but for rounding
        gain = change.exp() * advantages(rewards) * mask[:, 1:]
        optimizer.zero_grad()
        (-gain.sum() / mask.sum()).backward()
        optimizer.step()
        llm.update_weights(policy.named_parameters(), version=step)
        took = time.monotonic() - began
        mean, difference = sum(rewards) / len(rewards), change.abs().max()
        print(f"{step:4}  {mean:6.2f}  {difference:10.1e}  {took:7.1f}")
