"""Embeddings as prompts go through Ray's object store: the tokens are those of one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rayfin import LLM, SamplingParams
from rayfin.deployments.media.read_embeds import embeds_size

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def both(cluster: None, settings: dict[str, Any]) -> Iterator[tuple[LLM, LLM]]:
    own = {**settings, "enable_prompt_embeds": True}
    with LLM(executor="ray", **own) as there, LLM(**own) as here:
        yield there, here


def test_executors_agree(both: tuple[LLM, LLM]) -> None:
    there, here = both
    size = embeds_size(here._engine.info)
    torch.manual_seed(0)
    prompts: list[Any] = [{"prompt_embeds": 0.1 * torch.randn(count, size)} for count in (3, 40)]
    prompts.append("To be or not to be,")
    tokens = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        for llm in (there, here)
    ]
    assert tokens[0] == tokens[1] and len(set(map(tuple, tokens[0]))) == 3
    again = there.generate(prompts[1], GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens >= 32 and again.outputs[0].token_ids == tokens[0][1]


def test_chats_agree(both: tuple[LLM, LLM]) -> None:
    """Each part of a conversation is an object of its own in the store."""
    there, here = both
    size = embeds_size(here._engine.info)
    torch.manual_seed(1)
    rows = [torch.randn(count, size) for count in (3, 40)]
    parts = [{"type": "prompt_embeds", "data": own} for own in rows]
    said: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}, parts[0]]},
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, parts[1]]},
    ]
    other = [said[0], {"role": "user", "content": [said[1]["content"][0], parts[0]]}]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    answers = [
        [output.outputs[0] for output in llm.chat([said, other], params, use_tqdm=False)]
        for llm in (there, here)
    ]
    found = [[(one.token_ids, one.cumulative_logprob) for one in pair] for pair in answers]
    assert found[0] == found[1] and found[0][0] != found[0][1]
