"""Groups of runners give the tokens of one: ranks are threads here, with real Gloo between them."""

import itertools
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rank_groups import HOST, run_group
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, PeerLost, RayfinError
from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import Sampling
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.models.config import load_config
from rayfin.actors.runner.models.paged_model import ATTENTION
from rayfin.actors.runner.parallel.groups import ProcessGroups, open_store
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.runner.parallel.shard_weights import Checkpoint, load_share
from rayfin.actors.runner.parts.grammars.masker import GrammarsPart
from tiers import few

pytestmark = pytest.mark.slow(reason="starts groups of two and four ranks")

Make = Callable[..., Any]
OUTPUT = 12
SHAPES = [(2, 1), (1, 2), (2, 2), (1, 3)]  # tensor size, stages
OWN_PLANS = [
    *("phi3", "gpt2", "gpt_neox", "gpt_oss", "olmo2", "olmoe"),
    *("qwen2_moe", "deepseek_v2", "deepseek_v3"),
]
PROMPTS = [[5, 9, 3, 100, 7, 7, 60, 2, 44, 31, 8], [4, 9, 90], [77] * 6, [5, 9, 3, 100, 7, 7, 1]]


@pytest.mark.parametrize(
    ("form", "tensor", "stages"),
    few([(form, *shape) for form in ("llama", "gemma3_text") for shape in SHAPES], 4),
)
def test_greedy(
    form: str, tensor: int, stages: int, tiny_model: Make, group: Make, request_of: Make
) -> None:
    """What transformers says, with prompts in chunks, requests that come later, prefix hits."""
    tiny = tiny_model(form)
    ranks = group(tiny.folder, tensor, stages, max_batch_tokens=8)
    requests = [request_of(key, prompt, OUTPUT) for key, prompt in enumerate(PROMPTS)]
    tokens, _, engine = run_group(ranks, requests, stagger=2)
    assert tokens == {key: tiny.greedy(own, OUTPUT) for key, own in enumerate(PROMPTS)}
    assert engine.stats().prefix_hits > 0


@pytest.mark.parametrize(
    ("tensor", "stages", "lease"),
    few([(*shape, lease) for shape in SHAPES[:3] for lease in (1, 4)], 3),
)
def test_guided(
    tensor: int,
    stages: int,
    lease: int,
    tiny_model: Make,
    served: Make,
    group: Make,
    request_of: Make,
    tiny_tokenizer: Make,
) -> None:
    """Only the last stage compiles a grammar; its ranks agree on every mask."""
    settings = {"tokenizer": str(tiny_tokenizer("byte_level")), "max_lease": lease}
    folder = tiny_model("llama").folder
    grammar = Guidance(grammar="start: ROW+\nROW: /[a-d]{1,3}=[0-9]{1,4};/", ends=(2,))
    requests = [
        request_of(key, own, OUTPUT, eos=(2,), guidance=grammar if key else None)
        for key, own in enumerate(PROMPTS)
    ]
    ranks = group(folder, tensor, stages, **settings)
    tokens, _, _ = run_group(ranks, requests, fast=lease > 1)
    assert tokens == served(folder, **settings).run(*requests)
    parts = [runner._loaded.part(GrammarsPart) for runner in ranks.runners]
    compiled = [0 if part is None else len(part.book) for part in parts]
    assert compiled == [0] * (tensor * (stages - 1)) + [1] * tensor


@pytest.mark.parametrize(
    ("form", "tensor", "stages"),
    few(
        [
            ("mixtral", 2, 1),
            ("mixtral", 1, 2),
            ("qwen3_moe", 2, 1),
            ("cohere", 2, 1),
            ("glm4", 2, 1),
            ("glm4_moe", 2, 1),
            ("olmo3", 2, 1),
            *((form, *shape) for form in OWN_PLANS for shape in [(2, 1), (1, 2), (2, 2)]),
        ],
        7,
    ),
)
def test_families(
    form: str, tensor: int, stages: int, tiny_model: Make, group: Make, request_of: Make
) -> None:
    """What they have of their own: parts of every expert, shared ones, merged projections."""
    tiny = tiny_model(form)
    ranks = group(tiny.folder, tensor, stages, max_batch_tokens=8)
    requests = [request_of(key, prompt, OUTPUT, eos=(2,)) for key, prompt in enumerate(PROMPTS)]
    tokens, _, _ = run_group(ranks, requests)
    assert tokens == {key: tiny.greedy(own, OUTPUT) for key, own in enumerate(PROMPTS)}


SAMPLED = [
    Sampling(temperature=0.8, seed=11, top_k=40, top_p=0.9, logprobs=2),
    Sampling(temperature=1.0, seed=12, presence_penalty=0.5, frequency_penalty=0.3),
    Sampling(repetition_penalty=1.3, logprobs=0),
    Sampling(banned=(7, 9), banned_until=20, logit_bias=((5, 3.0),), bad_words=((3, 100),)),
]


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (2, 2)])
def test_what_one_rank_samples(
    tensor: int, stages: int, tiny_model: Make, served: Make, group: Make, request_of: Make
) -> None:
    """Seeds, penalties, rules and log probabilities; with preemption for want of pages."""
    folder = tiny_model("llama").folder
    alone = served(folder, max_batch_tokens=8)
    requests = [
        request_of(key, prompt, OUTPUT, sampling=SAMPLED[key]) for key, prompt in enumerate(PROMPTS)
    ]
    expected = alone.run(*requests)
    ranks = group(folder, tensor, stages, max_batch_tokens=8, max_model_len=24, num_pages=9)
    tokens, logprobs, engine = run_group(ranks, requests)
    assert tokens == expected
    assert engine.lifecycle.state.counters.preemptions > 0
    for key in (0, 2):
        reported = [entry[0] for entry in alone.logprobs[key]]
        assert logprobs[key] == pytest.approx(reported, abs=1e-4)


def test_a_pipeline_decodes_in_all_stages(tiny_model: Make, group: Make, request_of: Make) -> None:
    """While one share of the requests is in the second stage, the other is in the first."""
    tiny = tiny_model("llama")
    ranks = group(tiny.folder, 1, 2, max_batch_tokens=24)
    ranks.steps.clear()
    requests = [request_of(key, prompt, OUTPUT) for key, prompt in enumerate(PROMPTS)]
    tokens, _, _ = run_group(ranks, requests)
    assert tokens == {key: tiny.greedy(own, OUTPUT) for key, own in enumerate(PROMPTS)}
    steady = [set(step.ids.tolist()) for step in ranks.steps if step.decoding_batch == 2]
    assert len(steady) > OUTPUT
    assert all(one.isdisjoint(other) for one, other in itertools.pairwise(steady))


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_tokens_that_nobody_asks_for(
    steps_in_flight: int,
    tiny_model: Make,
    group: Make,
    request_of: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier stage takes in what the last one tells it, and keeps no more than is under way:
    where requests end with their first token, and where no step begins before the last is known."""
    tiny = tiny_model("llama")
    ranks = group(tiny.folder, 1, 2, max_batch_tokens=16)
    config = replace(ranks.config, steps_in_flight=steps_in_flight)
    monkeypatch.setattr(ranks, "config", config)
    ranks.restart()
    limit = 1 if steps_in_flight > 1 else OUTPUT
    requests = [request_of(key, PROMPTS[0], limit) for key in range(12)]
    tokens, _, _ = run_group(ranks, requests, stagger=2)
    assert set(map(tuple, tokens.values())) == {tuple(tiny.greedy(PROMPTS[0], limit))}
    taken, reported = (runner._loaded.peers._messages["tokens"] for runner in ranks.runners)
    assert reported >= 12 and reported - taken <= steps_in_flight


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
def test_lease(tensor: int, stages: int, tiny_model: Make, group: Make, request_of: Make) -> None:
    """Rows of one call end at different steps, on all ranks alike."""
    tiny = tiny_model("llama")
    ranks = group(tiny.folder, tensor, stages, max_batch_tokens=8, max_lease=8)
    limits = [3, 24, 7, 10]  # at last one is alone: in a pipeline the others take turns
    requests = [request_of(key, PROMPTS[key], limits[key]) for key in range(4)]
    tokens, _, _ = run_group(ranks, requests, fast=True)
    assert tokens == {key: tiny.greedy(PROMPTS[key], limits[key]) for key in range(4)}
    assert max(step.num_steps for step in ranks.steps) > 1


def test_fp8_pages_of_two_ranks(
    tiny_model: Make, served: Make, group: Make, request_of: Make
) -> None:
    """Each rounds its own heads' keys and values: the tokens of one device with such pages."""
    folder = tiny_model("llama").folder
    settings = {"max_batch_tokens": 8, "kv_cache_dtype": "fp8", "attention": "torch"}
    requests = [request_of(key, prompt, OUTPUT) for key, prompt in enumerate(PROMPTS)]
    ranks = group(folder, 2, 1, **settings)
    tokens, _, _ = run_group(ranks, requests)
    assert tokens == served(folder, **settings).run(*requests)
    assert {runner._loaded.page_type for runner in ranks.runners} == {torch.float8_e4m3fn}


def test_peer_that_does_not_come(tiny_model: Make, group: Make) -> None:
    """A rank that is alone says so, instead of waiting for ever."""
    ranks = group(tiny_model("llama").folder, 2, 1, max_batch_tokens=8)
    with pytest.raises(PeerLost, match="does not answer"):
        ranks.runners[0]._loaded.peers.connect("alone", 0.5)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("left_out", "steps"), [(2, (1, 1)), (None, (1, 2)), (None, (1, 1))])
def test_ranks_out_of_step(left_out: int | None, steps: tuple[int, int], begun: bool) -> None:
    """A rank that leaves a sum out, or is at another step: no rank goes on with wrong numbers."""
    store = open_store()
    # The others wait for a rank that leaves a sum out until the limit; else as long as it takes.
    patience = 60 if left_out is None else 2

    def agrees(at: int) -> bool:
        peers = ProcessGroups(ParallelRank(at, 2, 1, (HOST, store.port), HOST), torch.device("cpu"))
        peers.connect("out of step", patience)
        try:
            for number in range(4):
                if number != left_out or at == 0:
                    peers.sum(torch.ones(3, 8))
            if begun:
                peers.begin_agreement(steps[at])
            peers.agree(steps[at])
        except PeerLost:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        agreed = list(threads.map(agrees, range(2)))
    assert agreed == [left_out is None and len(set(steps)) == 1] * 2


@pytest.mark.parametrize(
    ("form", "tensor", "stages", "param", "words"),
    [
        ("llama", 3, 1, "tensor_parallel_size", "does not divide the model's num_attention_heads"),
        ("llama", 4, 1, "tensor_parallel_size", "num_key_value_heads (2)"),
        ("llama", 1, 4, "pipeline_parallel_size", "over the model's 3 layers"),
        ("gpt2", 3, 1, "tensor_parallel_size", "does not divide the model's num_attention_heads"),
        ("olmoe", 4, 1, "tensor_parallel_size", "num_key_value_heads (2)"),
        ("opt", 2, 1, "tensor_parallel_size", "(2): a model of type opt (OPTForCausalLM) cannot"),
        ("opt", 1, 2, "pipeline_parallel_size", "(2): a model of type opt (OPTForCausalLM) cannot"),
    ],
)
def test_refused(
    *,
    form: str,
    tensor: int,
    stages: int,
    param: str,
    words: str,
    tiny_model: Make,
    engine_args: Make,
) -> None:
    args = engine_args(tiny_model(form).folder)
    with pytest.raises(RayfinError, match=re.escape(words)) as refused:
        ModelRunner(args, ParallelRank(0, tensor, stages, (HOST, 1), HOST))
    assert refused.value.param == param


def test_uneven_width(tmp_path: Path, tiny_models: Any, engine_args: Make) -> None:
    """Of a part that the configuration does not name as its main one: the experts' shared one."""
    config = tiny_models.tiny_config("qwen2_moe")
    config.shared_expert_intermediate_size = 41
    config.save_pretrained(tmp_path)
    args = engine_args(tmp_path, load_format="dummy")
    words = r"tensor_parallel_size \(2\) does not divide .*shared_expert\.\w+ \(41\)"
    with pytest.raises(InvalidConfig, match=words):
        ModelRunner(args, ParallelRank(0, 2, 1, (HOST, 1), HOST))


def test_a_checkpoint_without_its_prefix(
    tmp_path: Path, tiny_model: Make, group: Make, request_of: Make
) -> None:
    """GPT-2's own was saved from the decoder alone: ``wte.weight``, and no head, which is tied."""
    tiny = tiny_model("gpt2")
    shutil.copy(tiny.folder / "config.json", tmp_path)
    weights = load_file(tiny.folder / "model.safetensors")
    own = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    assert "wte.weight" in own and "lm_head.weight" not in own
    save_file(own, tmp_path / "model.safetensors", {"format": "pt"})
    ranks = group(tmp_path, 2, 2)
    tokens, _, _ = run_group(ranks, [request_of(0, PROMPTS[0], OUTPUT, eos=(2,))])
    assert tokens == {0: tiny.greedy(PROMPTS[0], OUTPUT)}


@pytest.mark.parametrize(
    ("form", "projections"),
    [
        ("phi3", ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]),
        ("gpt2", ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]),
        ("deepseek_v3", ["self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"]),
        ("olmoe", ["self_attn.q_norm", "self_attn.k_norm", "self_attn.q_proj"]),
    ],
)
def test_own_plans_read_slices(
    form: str, projections: list[str], tiny_model: Make, engine_args: Make, read: Make
) -> None:
    """Half of each projection, merged and transposed ones too, in slices."""
    tiny = tiny_model(form)
    seen = read(engine_args(tiny.folder), ParallelRank(1, 2, 1, (HOST, 1), HOST))
    whole = tiny.model.state_dict()
    for projection in projections:
        (name,) = (key for key in whole if key.endswith(f".1.{projection}.weight"))
        assert 2 * sum(part.numel() for part in seen[name]) == whole[name].numel()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Loads a rank's share; what it has read from the checkpoint, by name."""

    def load(args: EngineArgs, place: ParallelRank) -> dict[str, list[torch.Tensor]]:
        seen = defaultdict[str, list[torch.Tensor]](list)

        def spy(checkpoint: Checkpoint, name: str, *how: Any) -> torch.Tensor:
            seen[name].append(own_read(checkpoint, name, *how))
            return seen[name][-1]

        own_read = Checkpoint.read
        monkeypatch.setattr(Checkpoint, "read", spy)
        peers = ProcessGroups(place, torch.device("cpu"))  # never connected
        load_share(args, load_config(args), torch.device("cpu"), ATTENTION, peers)
        return seen

    return load


def test_a_rank_reads_its_share(tiny_model: Make, engine_args: Make, read: Make) -> None:
    """Of each cut tensor its slice and no more; of other stages' layers nothing."""
    tiny = tiny_model("llama")
    seen = read(engine_args(tiny.folder), ParallelRank(3, 2, 2, (HOST, 1), HOST))
    whole = tiny.model.state_dict()
    assert not [name for name in seen if ".layers.0." in name or "embed" in name]
    query, out = "model.layers.1.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(seen[query][0], whole[query][16:])
    assert torch.equal(seen[out][0], whole[out][:, 24:])
    assert torch.equal(seen["lm_head.weight"][0], whole["lm_head.weight"][64:])
