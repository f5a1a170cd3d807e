"""Suffixes: ended requests of one's own group are looked up, and those of no other."""

import numpy as np

from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.speculation.ngram import NGramProposer
from rayfin.actors.runner.speculation.suffix import ARCHIVES, SuffixProposer

TEXT = [5, 9, 3, 7, 2, 8, 6, 4, 11, 12, 13, 14]


def proposer_of(factor: float = 8.0, most_texts: int = 100) -> SuffixProposer:
    ngrams = NGramProposer(4, 64)
    return SuffixProposer(4, 64, most_texts=most_texts, factor=factor, ngrams=ngrams)


def add(proposer: SuffixProposer, slot: int, text: list[int], tenant: str = "", *keys: str) -> None:
    history = np.array(text, np.int32)
    proposer.add(
        slot, NewRequest(slot, Sampling(), cap=64, history=history, tenant=tenant, extra_keys=keys)
    )


def end(proposer: SuffixProposer, text: list[int], tenant: str = "", *keys: str) -> None:
    """A request with this text has come and gone."""
    add(proposer, 3, text, tenant, *keys)
    proposer.remove(3)


def drafts(proposer: SuffixProposer, slot: int, room: int = 16) -> list[int]:
    found = proposer.propose(np.array([slot]), np.array([room]))
    return found.tokens[0, : found.lengths[0]].tolist()


def test_an_ended_request_is_looked_up_to_its_end() -> None:
    proposer = proposer_of()
    end(proposer, TEXT)
    end(proposer, [50, 51, 52, 53])
    add(proposer, 0, [40, 41, 9, 3, 7])
    assert drafts(proposer, 0) == TEXT[4:]
    assert drafts(proposer, 0, 3) == TEXT[4:7]
    assert drafts(proposer_of(), 1) == []


def test_the_longer_match_wins_and_allows_more() -> None:
    proposer = proposer_of(factor=1.0)
    end(proposer, TEXT)
    add(proposer, 0, [2, 8, 30, 31, 5, 9, 3, 7, 2, 8])  # its own text has two tokens, TEXT six
    assert drafts(proposer, 0) == TEXT[6:12]
    end(proposer, [21, 22, 23, 24, 25, 26, 27])
    add(proposer, 1, [60, 22, 23, 24])
    assert drafts(proposer, 1) == [25, 26, 27]
    assert drafts(proposer, 1, 2) == [25, 26]


def test_no_group_reads_anothers_texts() -> None:
    proposer = proposer_of()
    end(proposer, TEXT, "a")
    end(proposer, [*TEXT[:6], *range(40, 46)], "b", "salt")
    for slot, (tenant, keys) in enumerate([("b", ()), ("", ()), ("a", ("salt",))]):
        add(proposer, slot, TEXT[:6], tenant, *keys)
        assert drafts(proposer, slot) == []
    add(proposer, 0, TEXT[:6], "a")
    add(proposer, 1, TEXT[:6], "b", "salt")
    both = proposer.propose(np.array([0, 1]), np.array([6, 6]))
    assert both.tokens.tolist() == [TEXT[6:12], list(range(40, 46))]


def test_old_texts_and_groups_are_forgotten() -> None:
    proposer = proposer_of(most_texts=2)
    end(proposer, TEXT)
    end(proposer, [50, 51, 52, 53])
    add(proposer, 0, TEXT[:6])
    assert drafts(proposer, 0)
    end(proposer, [60, 61, 62, 63])
    assert drafts(proposer, 0) == []
    end(proposer, TEXT)
    assert drafts(proposer, 0)
    for number in range(ARCHIVES):
        end(proposer, TEXT, f"tenant {number}")
    assert drafts(proposer, 0) == []
    ring = proposer_of()
    end(ring, TEXT)
    for number in range(100):
        end(ring, [number % 7 + 70] * 40)
    add(ring, 0, TEXT[:6])
    assert drafts(ring, 0) == []
