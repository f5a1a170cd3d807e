"""N-grams against a plain search of each request's text."""

import random
from typing import Any

import numpy as np
import pytest

from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.speculation.ngram import NGramProposer

SHORTEST, LONGEST = 2, 4


def search(text: list[int], most: int) -> list[int]:
    """What followed the longest of the last n-grams where it stood last; a loop goes on."""
    for n in range(LONGEST, SHORTEST - 1, -1):
        for place in range(len(text) - 1, n - 1, -1):
            if len(text) > n and text[place - n : place] == text[-n:]:
                loop = text[place:]
                return [loop[i % len(loop)] for i in range(most)]
    return []


def new_request(slot: int, text: list[int]) -> NewRequest:
    return NewRequest(slot, Sampling(), cap=10**6, history=np.array(text, np.int32))


def drafts_of(proposer: NGramProposer, slots: list[int], room: list[int]) -> list[list[int]]:
    found = proposer.propose(np.array(slots), np.array(room))
    return [row[:n].tolist() for row, n in zip(found.tokens, found.lengths, strict=True)]


@pytest.mark.parametrize("words", [2, 5, 50])
def test_drafts_are_those_of_a_plain_search(words: int) -> None:
    rng = random.Random(words)
    slots = 5
    proposer = NGramProposer(slots, 300, shortest=SHORTEST, longest=LONGEST)
    texts: dict[int, list[int]] = {}
    missed = total = 0
    for _ in range(120):
        slot = rng.randrange(slots)
        if slot in texts and rng.random() < 0.1:
            proposer.remove(slot)
            del texts[slot]
        if slot not in texts:
            texts[slot] = [rng.randrange(words) for _ in range(rng.randint(1, 60))]
            proposer.add(slot, new_request(slot, texts[slot]))
        active = sorted(texts)
        counts = np.array([rng.randint(0, 3) for _ in active])
        tokens = np.array([[rng.randrange(words) for _ in range(3)] for _ in active], np.int32)
        proposer.accept(np.array(active), tokens, counts)
        for own, row, count in zip(active, tokens, counts.tolist(), strict=True):
            texts[own] += row[:count].tolist()
        room = [rng.randint(1, 6) for _ in active]
        for own, draft, most in zip(active, drafts_of(proposer, active, room), room, strict=True):
            expected = search(texts[own], most)
            total += bool(expected)
            missed += draft != expected
            assert draft == expected or len(draft) in (0, most)
    assert total > 10 and missed <= 2 + total // 20  # n-grams whose hashes collide take turns


def test_a_slot_says_nothing_of_the_one_before() -> None:
    proposer = NGramProposer(2, 100)
    proposer.add(0, new_request(0, [1, 2, 3, 4, 1, 2, 3]))
    assert drafts_of(proposer, [0], [2]) == [[4, 1]]
    proposer.remove(0)
    proposer.add(0, new_request(0, [9, 8, 7, 1, 2, 3]))
    proposer.add(1, new_request(1, [1, 2, 3]))
    assert drafts_of(proposer, [0, 1], [2, 2]) == [[], []]


def test_longer_matches_are_trusted_more() -> None:
    proposer = NGramProposer(2, 100)
    words: Any = list(range(20))
    proposer.add(0, new_request(0, [*words, 77, *words]))
    proposer.add(1, new_request(1, [3, 4, 77, 50, 3, 4]))
    found = proposer.propose(np.array([0, 1]), np.array([1, 1]))
    assert found.tokens[:, 0].tolist() == [77, 77]
    assert found.trust is not None and found.trust[0] > found.trust[1]
