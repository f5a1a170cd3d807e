import pytest
from tools.commit_subject import complaint


@pytest.mark.parametrize(
    "subject",
    [
        "scheduler: free pages before the next step",
        "runner, cache: pass hashes of pages\n\nWhy it is so.",
        "docs/serving.md: describe flags of batches",
        "tests: process both files",
        'Revert "scheduler: free pages"',
    ],
)
def test_takes_a_room_and_an_imperative(subject: str) -> None:
    assert complaint(subject) is None


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        ("x", "room: verb"),
        ("Scheduler: free pages", "room: verb"),
        ("scheduler: The pages are free", "room: verb"),
        ("scheduler: frees pages", "frees"),
        ("scheduler: freed pages", "freed"),
        ("scheduler: freeing pages", "freeing"),
        ("scheduler: free pages.", "full stop"),
        ("scheduler: free " + "x" * 60, "72"),
        ("", "room: verb"),
    ],
)
def test_says_what_is_wrong(subject: str, why: str) -> None:
    wrong = complaint(subject)
    assert wrong is not None
    assert why in wrong
