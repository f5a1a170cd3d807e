"""What an ingress counts of guided requests, tool calls and thoughts."""

from rayfin.actors.metrics.ledger import Series
from rayfin.deployments.telemetry.ingress_counters import (
    GUIDED_KINDS,
    IMAGE_REFUSALS,
    INGRESS_METRICS,
    TOOL_CHOICES,
    VERDICTS,
    IngressCounters,
)

NEW = {family.name: family for family in INGRESS_METRICS}


def test_calls_are_counted_under_their_labels() -> None:
    counts = IngressCounters()
    counts.guided_requests["json"] += 1
    counts.grammar_verdicts["too_complex"] += 1
    counts.warden_restarts += 1
    counts.tool_calls["required"] += 2
    counts.tool_calls_unparsed += 1
    counts.tool_calls_cut += 1
    counts.reasoning_tokens += 7
    counts.thinking_budgets_spent += 1
    counts.reads("hermes", None)
    report = counts.report()
    expected: dict[Series, float] = {
        ("guided_requests", ("json",)): 1,
        ("grammar_verdicts", ("too_complex",)): 1,
        ("warden_restarts", ()): 1,
        ("tool_calls", ("required",)): 2,
        ("tool_calls_unparsed", ()): 1,
        ("tool_calls_cut", ()): 1,
        ("reasoning_tokens", ()): 7,
        ("thinking_budgets_spent", ()): 1,
    }
    assert {series: n for series, n in report.counters.items() if n} == expected
    assert report.gauges["output_format", ("hermes", "none")] == 1


def test_every_label_is_there_from_the_start() -> None:
    report = IngressCounters().report()
    for name, words in (
        ("guided_requests", GUIDED_KINDS),
        ("grammar_verdicts", VERDICTS),
        ("tool_calls", TOOL_CHOICES),
        ("image_refusals", IMAGE_REFUSALS),
    ):
        assert NEW[name].words == words
        assert {labels[0] for found, labels in report.counters if found == name} == set(words)


def test_a_word_of_no_label_makes_no_series() -> None:
    counts = IngressCounters()
    counts.guided_requests["get_weather"] += 1
    assert counts.report().counters == IngressCounters().report().counters


def test_images() -> None:
    counts = IngressCounters()
    counts.media.images.observe(2)
    counts.media.refused("invalid_image")
    counts.media.refused("context_length_exceeded")
    report = counts.report()
    assert report.histograms["request_images", ()].sum == 2
    refused = {labels[0]: n for (name, labels), n in report.counters.items() if "refusals" in name}
    assert {code for code, n in refused.items() if n} == {"invalid_image", "other"}
