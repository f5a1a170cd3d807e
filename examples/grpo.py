"""GRPO on Ray: the demo model, with noise in its weights, learns to add again.

    python examples/grpo.py --seed 1              # two engines of its own, as Ray actors
    python examples/grpo.py --app rayfin          # the engines of `rayfin serve demo`
    python examples/grpo.py --kills 5             # runners die amid rollouts

A trainer is an actor with a model of transformers. Each step samples a group of answers to each
sum, rewards the right ones, moves the weights towards these, and hands them to all engines.
Without noise the model adds right at once, and nothing is left to learn.
"""

import argparse
import asyncio
import os
import random
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
import torch
from transformers import AutoModelForCausalLM

from rayfin import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from rayfin.actors.processes.registry import engine_names, find_actor
from rayfin.deployments.serve.preflight import model_path
from rayfin.rollouts import connect, put

CLIP = 0.2
EPOCHS = 2
"""Steps of the optimizer with the same answers."""


class Sample(NamedTuple):
    """One answer, as a trainer needs it."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]  # of what its tokens were drawn from
    advantage: float


@ray.remote(num_cpus=0)
class Trainer:
    """The policy that learns."""

    def __init__(self, temperature: float, rate: float, noise: float) -> None:
        torch.set_num_threads(1)
        self._temperature = temperature
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model_path("demo"), dtype=torch.float32
        )
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.ndim > 1:
                    parameter += (
                        noise * parameter.std() * torch.randn(parameter.shape, generator=draw)
                    )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), rate, weight_decay=0)

    def weights(self) -> list[Any]:
        """Refs of the policy's tensors, which lie in Ray's store."""
        return list(put(self._model.named_parameters()))

    def step(self, samples: Sequence[Sample]) -> float:
        """Learns from answers; returns how far the engine's log probabilities are from its own."""
        longest = max(len(sample.prompt) + len(sample.answer) for sample in samples)
        ids = torch.zeros(len(samples), longest, dtype=torch.long)
        seen, before = torch.zeros_like(ids), torch.zeros(len(samples), longest - 1)
        learned = torch.zeros_like(before)
        for row, sample in enumerate(samples):
            start, end = len(sample.prompt), len(sample.prompt) + len(sample.answer)
            ids[row, :end] = torch.tensor(sample.prompt + sample.answer)
            seen[row, :end] = 1
            before[row, start - 1 : end - 1] = torch.tensor(sample.logprobs)
            learned[row, start - 1 : end - 1] = 1
        advantage = torch.tensor([[sample.advantage] for sample in samples])
        apart = list[float]()
        for _ in range(EPOCHS):
            logits = self._model(input_ids=ids, attention_mask=seen).logits[:, :-1]
            scores = (logits / self._temperature).log_softmax(-1)
            now = scores.gather(2, ids[:, 1:, None]).squeeze(2)
            ratio = (now - before).mul(learned).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            self._optimizer.zero_grad()
            (-(gain * learned).sum() / learned.sum()).backward()
            self._optimizer.step()
            apart.append(float(((now - before).abs() * learned).sum().detach() / learned.sum()))
        return apart[0]


async def rollouts(
    llm: AsyncLLM, sums: Sequence[tuple[int, int]], group: int, temperature: float, seed: int
) -> tuple[float, list[Sample]]:
    """Answers to each sum, and their mean reward."""

    async def answers(place: int, a: int, b: int) -> tuple[list[float], list[Sample]]:
        params = SamplingParams(
            **{"n": group, "temperature": temperature, "max_tokens": 20, "seed": seed + place},
            logprobs=0,
            logprobs_mode="processed_logprobs",
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        asked = [{"role": "user", "content": f"What is {a} + {b}?"}]
        (output,) = [output async for output in llm.chat(asked, params)]
        rewards = [
            float(completion.text == f"{a} + {b} = {a + b}") for completion in output.outputs
        ]
        mean = sum(rewards) / group
        spread = (mean * (1 - mean)) ** 0.5 or 1.0
        samples = []
        for completion, reward in zip(output.outputs, rewards, strict=True):
            scored = zip(completion.token_ids, completion.logprobs or [], strict=True)
            logprobs = [entry[token].logprob for token, entry in scored]
            advantage = (reward - mean) / spread
            samples.append(
                Sample(output.prompt_token_ids, completion.token_ids, logprobs, advantage)
            )
        return rewards, samples

    groups = await asyncio.gather(*(answers(i, a, b) for i, (a, b) in enumerate(sums)))
    rewards = [reward for group_rewards, _ in groups for reward in group_rewards]
    learnable = [sample for _, samples in groups for sample in samples if sample.advantage]
    return sum(rewards) / len(rewards), learnable


def kill_runner() -> None:
    """Kills a runner of an engine of this cluster; its requests go on."""
    names = engine_names("")
    for name in random.sample(names, len(names)):
        if not name.rpartition("/")[2].isdigit():  # it updates weights
            continue
        scheduler = find_actor(name)
        runners = [] if scheduler is None else ray.get(scheduler.runners.remote())
        if runners:
            os.kill(random.choice(runners).pid, signal.SIGKILL)
            return


async def train(options: argparse.Namespace) -> list[float]:
    """Trains, and returns the mean reward of each step."""
    if options.app:
        llm = await connect(options.app)
    else:
        engine = {"dtype": "float32", "threads": 1, "kv_cache_memory": 64 << 20}
        args = AsyncEngineArgs("demo", data_parallel_size=options.engines, **engine)
        llm = AsyncLLM.from_engine_args(args, executor="ray")
    draw, means = random.Random(options.seed), list[float]()
    kills = draw.sample(range(options.steps), min(options.kills, options.steps))
    async with llm:
        trainer = Trainer.remote(options.temperature, options.rate, options.noise)
        await llm.update_weights(await trainer.weights.remote(), "step-0")
        for step in range(options.steps):
            sums = [(draw.randrange(100), draw.randrange(100)) for _ in range(options.sums)]
            asked = (llm, sums, options.group, options.temperature, draw.randrange(1 << 30))
            rolling = asyncio.ensure_future(rollouts(*asked))
            if step in kills:
                await asyncio.to_thread(kill_runner)
            mean, samples = await rolling
            apart = await trainer.step.remote(samples) if samples else 0.0
            weights = await trainer.weights.remote()
            await llm.update_weights(weights, f"step-{step + 1}")
            means.append(mean)
            print(f"step {step + 1}: reward {mean:.3f}, logprobs apart {apart:.1e}", flush=True)
    return means


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--app", help="an application of `rayfin serve demo` on this cluster")
    parser.add_argument("--engines", type=int, default=2, help="of its own")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sums", type=int, default=16, help="questions of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to each")
    parser.add_argument("--temperature", type=float, default=1.3)
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate")
    parser.add_argument("--noise", type=float, default=0.5, help="in units of a matrix' spread")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0, help="runners to kill")
    options = parser.parse_args(argv)
    ray.init(address="auto" if options.app else "local", include_dashboard=False)
    return asyncio.run(train(options))


if __name__ == "__main__":
    main()
