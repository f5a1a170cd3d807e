"""The section on one engine inline and as Ray actors (``executors.py``)."""

from core_report import Report, middle, number, verdict
from executors import REQUESTS, compare

SHAPES = {
    "demo": ("built-in, 2M parameters", 0.90),
    "135m": ("Llama shape, 135M, random weights", 0.97),
}
"""The model, and the minimum share of the throughput that actors must keep."""


def write(report: Report, *, toy: bool = False) -> None:
    rounds, requests = (1, 2) if toy else (2, REQUESTS)
    report.heading("Actors against one process")
    report.text(f"""Offline throughput of the same engine with its runner in this process, and with
        scheduler and runner as Ray actors: {requests} requests, prompts of 50 to 400 tokens, 20 to
        120 output tokens, greedy; {rounds} rounds with new prompts, in turns.""")
    rows, verdicts = [], []
    for shape in ("demo",) if toy else SHAPES:
        name, minimum = SHAPES[shape]
        rates = compare(shape, rounds, requests=requests)
        inline, ray = map(middle, rates.values())
        ratio = middle([r / i for i, r in zip(rates["inline"], rates["ray"], strict=True)])
        rows.append([name, number(inline), number(ray), f"{ratio:.3f}", f"{minimum:.2f}"])
        verdicts.append(f"{name}: {verdict(ratio >= minimum)}")
    report.table(
        ["model", "inline, tokens/s", "actors, tokens/s", "actors / inline", "at least"], rows
    )
    report.text(f"""Targets: {"; ".join(verdicts)}. `python benchmarks/executors.py` measures one of
        them with other threads or more rounds.""")
