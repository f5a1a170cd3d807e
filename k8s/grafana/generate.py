"""Writes the Grafana dashboards beside it, and the PrometheusRule from the rules of Prometheus.

    python k8s/grafana/generate.py

A panel is a title, a unit and its queries; everything else of Grafana's JSON is the same for all.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RULES = HERE.parent / "prometheus" / "rules" / "rayfin.yaml"
PROMETHEUS_RULE = HERE.parent / "prometheus" / "prometheusrule.yaml"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
MODEL = 'model_name=~"$model"'
ENGINE = f'{MODEL},engine=~"$engine"'
WIDTH, HEIGHT = 8, 8  # of a panel; a dashboard is 24 wide


@dataclass(frozen=True)
class Panel:
    """One panel; ``queries`` map legends to PromQL."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"  # or "stat", "heatmap"
    stacked: bool = False
    help: str = ""


def rate(name: str, labels: str = ENGINE, by: str = "", window: str = "$__rate_interval") -> str:
    """Returns the growth of a counter per second."""
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate(rayfin_{name}{{{labels}}}[{window}]))"


def grown(name: str, labels: str = ENGINE) -> str:
    """Returns the growth of a counter between two points of the panel."""
    return f"sum (increase(rayfin_{name}{{{labels}}}[$__rate_interval]))"


def total(name: str, labels: str = ENGINE, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rayfin_{name}{{{labels}}})"


def quantile(q: float, name: str, labels: str = ENGINE, by: str = "") -> str:
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', labels, f'le, {by}' if by else 'le')})"


def quantiles(name: str, labels: str = ENGINE) -> dict[str, str]:
    lines = {f"p{round(100 * q)}": quantile(q, name, labels) for q in (0.5, 0.9, 0.95, 0.99)}
    return {**lines, "mean": mean(name, labels)}


def mean(name: str, labels: str = ENGINE) -> str:
    return f"{rate(f'{name}_sum', labels)} / {rate(f'{name}_count', labels)}"


def ratio(part: str, whole: str, labels: str = ENGINE, by: str = "") -> str:
    return f"{rate(part, labels, by)} / {rate(whole, labels, by)}"


def latency(title: str, name: str, labels: str = ENGINE, help: str = "") -> Panel:
    return Panel(title, quantiles(name, labels), "s", help=help)


def heatmap(title: str, name: str, labels: str = ENGINE, unit: str = "short") -> Panel:
    window = "$__rate_interval"
    query = f"sum by (le) (increase(rayfin_{name}_bucket{{{labels}}}[{window}]))"
    return Panel(title, {"{{le}}": query}, unit, "heatmap")


def each(name: str, label: str, labels: str = ENGINE) -> dict[str, str]:
    """Returns the rate of a counter by one of its labels."""
    return {f"{{{{{label}}}}}": rate(name, labels, label)}


TTFT, ITL, E2E = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
)
HIT_RATIO = ratio("prefix_cache_hits_total", "prefix_cache_queries_total")
TOKENS = {
    "prompt": rate("prompt_tokens_total"),
    "generated": rate("generation_tokens_total"),
}
REQUESTS = {"running": total("num_requests_running"), "waiting": total("num_requests_waiting")}
BY_ENGINE = "engine {{engine}}"
TO_READ = "tools, reasoning"

OVERVIEW = [
    Panel("Engines", {"engines": f"count (rayfin_num_requests_running{{{ENGINE}}})"}, kind="stat"),
    Panel("Ingresses", {"ingresses": total("ingress_replicas", MODEL)}, kind="stat"),
    Panel("In flight", {"requests": total("http_requests_in_flight", MODEL)}, kind="stat"),
    Panel("Answers by status", each("http_requests_total", "status", MODEL), "reqps", stacked=True),
    Panel("Tokens", TOKENS, "tokens/s"),
    Panel("Requests in the engines", REQUESTS),
    latency("Time to first token", TTFT, MODEL),
    latency("Between tokens", ITL, MODEL),
    latency("Whole request", E2E, MODEL),
    Panel(
        "KV cache in use",
        {BY_ENGINE: f"rayfin_kv_cache_usage_perc{{{ENGINE}}}"},
        "percentunit",
    ),
    Panel("Prompt tokens found in the cache", {"share": HIT_RATIO}, "percentunit"),
    Panel("How requests end", each("request_success_total", "finished_reason"), "reqps"),
    Panel("Open batches", {"{{status}}": f"sum by (status) (rayfin_batches_open{{{MODEL}}})"}),
    Panel("Lines of batches that wait", {"lines": total("batch_lines_waiting", MODEL)}),
    Panel("Lines of batches", each("batch_lines_total", "result", MODEL), "reqps", stacked=True),
    Panel(
        "A batch will miss its window by",
        {"seconds": f"max (rayfin_batch_seconds_behind{{{MODEL}}})"},
        "s",
        help="The latest one, at its pace until now; 0 where all end in time.",
    ),
]

PHASES = {
    "ingress": mean("ingress_time_seconds", MODEL),
    "transport": mean("request_transport_seconds", MODEL),
    "queue": mean("request_queue_time_seconds"),
    "prefill": mean("request_prefill_time_seconds"),
    "decode": mean("request_decode_time_seconds"),
}

LATENCY = [
    Panel("Where the time goes", PHASES, "s", stacked=True, help="Means of the phases."),
    latency("Time to first token", TTFT, MODEL),
    latency("First event on the wire", "first_flush_seconds", MODEL, "Of streamed requests."),
    heatmap("Time to first token, all", TTFT, MODEL, "s"),
    latency("Between tokens", ITL, MODEL),
    heatmap("Between tokens, all", ITL, MODEL, "s"),
    latency("Time per output token", "request_time_per_output_token_seconds"),
    latency("Whole request", E2E, MODEL),
    latency("Ingress", "ingress_time_seconds", MODEL, "Checks, template, tokenizing."),
    latency(
        "Between ingress and engine",
        "request_transport_seconds",
        MODEL,
        "To the engine, until its loop accepts the request, and back with the first token.",
    ),
    latency(
        "Between scheduler and runner",
        "step_transport_seconds",
        help="Transport of a step, as far as the step before did not hide it.",
    ),
    latency("Queue", "request_queue_time_seconds"),
    latency("Prefill", "request_prefill_time_seconds"),
    latency("Decode", "request_decode_time_seconds"),
    latency("Inference", "request_inference_time_seconds", help="Prefill and decode."),
]

CACHE = [
    Panel(
        "KV cache in use",
        {BY_ENGINE: f"rayfin_kv_cache_usage_perc{{{ENGINE}}}"},
        "percentunit",
    ),
    Panel(
        "Pages by state",
        {"{{state}}": total("kv_cache_pages_by_state", by="state")},
        stacked=True,
        help="Held by requests, free with reusable content, free.",
    ),
    Panel("Pages", {BY_ENGINE: f"rayfin_kv_cache_pages{{{ENGINE}}}"}, kind="stat"),
    Panel("Prompt tokens found in the cache", {"share": HIT_RATIO}, "percentunit"),
    Panel(
        "Looked up and found",
        {
            "looked up": rate("prefix_cache_queries_total"),
            "found": rate("prefix_cache_hits_total"),
        },
        "tokens/s",
    ),
    Panel(
        "Where prompts' tokens come from",
        each("prompt_tokens_by_source_total", "source"),
        "tokens/s",
        stacked=True,
    ),
    Panel("Evicted pages", {"evictions": rate("kv_cache_evictions_total")}, "ops"),
    Panel(
        "Prompt tokens that were not in the cache, of a request",
        quantiles("request_prefill_kv_computed_tokens"),
    ),
    Panel("Cached pages in host memory", {BY_ENGINE: f"rayfin_pages_host{{{ENGINE}}}"}),
    Panel("Swap space in use", {BY_ENGINE: f"rayfin_swap_usage_perc{{{ENGINE}}}"}, "percentunit"),
    Panel(
        "Pages swapped",
        {
            "out": rate("swapped_out_pages_total"),
            "in": rate("swapped_in_pages_total"),
        },
        "ops",
    ),
    Panel(
        "Pages of other engines (p2p), of the disk and of host memory",
        {
            "{{source}} {{result}}": rate("pages_read_total", by="source, result"),
            "disk written": rate("disk_pages_written_total"),
        },
        "ops",
    ),
    Panel(
        "Speed of these reads",
        {
            "{{source}}": f"sum by (source) (rate(rayfin_page_bytes_total{{{ENGINE},"
            'direction="read"}[$__rate_interval])) / '
            + rate("page_read_seconds_total", by="source")
        },
        "Bps",
    ),
    Panel("Requests that wait for pages", {BY_ENGINE: f"rayfin_requests_reading{{{ENGINE}}}"}),
]

SCHEDULER = [
    Panel("Requests in the engines", REQUESTS),
    Panel(
        "Waiting, by reason",
        {"{{reason}}": total("num_requests_waiting_by_reason", by="reason")},
        stacked=True,
    ),
    Panel(
        "Sessions",
        {"seated": total("num_sessions_seated"), "parked turns": total("num_requests_parked")},
    ),
    Panel("Sessions that lost their pages", each("session_lapses_total", "reason"), "ops"),
    Panel(
        "Tokens of sessions computed again",
        {BY_ENGINE: rate("session_tokens_recomputed_total", by="engine")},
    ),
    Panel("Prompt tokens waiting", {BY_ENGINE: f"rayfin_num_waiting_tokens{{{ENGINE}}}"}),
    Panel("Tokens of a step", quantiles("iteration_tokens_total")),
    heatmap("Tokens of a step, all", "iteration_tokens_total"),
    Panel("Steps", {BY_ENGINE: rate("engine_steps_total", by="engine")}, "ops"),
    Panel(
        "Time of a step in the runner",
        {BY_ENGINE: ratio("step_seconds_total", "engine_steps_total", by="engine")},
        "s",
    ),
    Panel(
        "Share of the time that runners work",
        {BY_ENGINE: rate("step_seconds_total", by="engine")},
        "percentunit",
    ),
    Panel("Tokens", TOKENS, "tokens/s"),
    Panel(
        "Preemptions",
        {
            "all": rate("num_preemptions_total"),
            "by swap": rate("num_preemptions_by_swap_total"),
        },
        "ops",
    ),
    Panel("Preemptions of a request", {"mean": mean("request_num_preemptions")}),
    heatmap("Prompt lengths", "request_prompt_tokens"),
    heatmap("Output lengths", "request_generation_tokens"),
    heatmap("Output limits", "request_params_max_tokens"),
    Panel("Choices of a prompt", {"mean": mean("request_params_n", MODEL)}),
    Panel("Longest choice of a prompt", quantiles("request_max_num_generation_tokens", MODEL)),
]

RELIABILITY = [
    Panel("Failures", each("request_failures_total", "code"), "reqps"),
    Panel("Refused requests", each("admission_rejections_total", "reason"), "reqps"),
    Panel(
        "Answers by route and status",
        {"{{handler}} {{status}}": rate("http_requests_total", MODEL, "handler, status")},
        "reqps",
    ),
    Panel(
        "Restarts",
        {
            "runners": grown("runner_restarts_total"),
            "engines": grown("engine_restarts_total"),
        },
    ),
    Panel("Epoch", {BY_ENGINE: f"rayfin_engine_epoch{{{ENGINE}}}"}),
    Panel("Replays", each("request_replays_total", "reason", MODEL), "reqps"),
    Panel(
        "Moves to another engine",
        {"{{reason}} {{result}}": rate("moves_total", MODEL, "reason, result")},
        "reqps",
    ),
    Panel(
        "Requeued and handed back",
        {
            "requeued": rate("num_requests_requeued_total"),
            "moved": rate("requests_moved_total"),
        },
        "reqps",
    ),
    Panel("Suspects on trial", {BY_ENGINE: f"rayfin_quarantine_suspects{{{ENGINE}}}"}),
    Panel("Spare runners ready", {BY_ENGINE: f"rayfin_spare_runners{{{ENGINE}}}"}),
    Panel("Logits that were not finite", {"requests": rate("corrupted_requests_total")}, "reqps"),
    Panel("Disconnected clients", {"requests": rate("client_disconnects_total", MODEL)}, "reqps"),
    Panel("No step finished for", {BY_ENGINE: f"rayfin_engine_stalled_seconds{{{ENGINE}}}"}, "s"),
    Panel("Draining", {BY_ENGINE: f"rayfin_engine_draining{{{ENGINE}}}"}),
    Panel("Awake or asleep", {"{{sleep_state}}": total("engine_sleep_state", by="sleep_state")}),
    Panel("Number of the weights", {BY_ENGINE: f"rayfin_weights_serial{{{ENGINE}}}"}),
    Panel("Weights by name", {"{{engine}}: {{version}}": f"rayfin_weights_info{{{ENGINE}}}"}),
    Panel(
        "New weights",
        {
            "{{result}}": rate("weight_updates_total", by="result"),
            "seconds, {{phase}}": rate("weight_update_seconds_total", by="phase"),
        },
    ),
    Panel("Bytes of new weights", {"{{source}}": rate("weight_bytes_total", by="source")}, "Bps"),
    Panel(
        "Pauses for new weights",
        {
            "paused": total("engine_paused"),
            "seconds": rate("pause_seconds_total"),
            "requests carried over, {{kv}}": rate("carried_requests_total", by="kv"),
        },
    ),
    Panel("Time in plug-ins", {"{{name}}": rate("plugin_seconds_total", by="name")}, "percentunit"),
    Panel(
        "Age of the numbers",
        {
            BY_ENGINE: f"time() - rayfin_engine_reported_timestamp_seconds{{{ENGINE}}}",
            "ingresses": f"time() - min(rayfin_ingress_reported_timestamp_seconds{{{MODEL}}})",
        },
        "s",
    ),
]

ACCEPTED, DRAFTS = "spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total"
ACCEPTED_AT = rate("spec_decode_num_accepted_tokens_per_pos_total", by="position")

SPECULATION = [
    Panel(
        "Tokens of a step with a draft",
        {BY_ENGINE: f"1 + {ratio(ACCEPTED, DRAFTS, by='engine')}"},
        help="Mean acceptance length: the right drafts, and the token behind them.",
    ),
    Panel(
        "Drafted tokens that were right",
        {BY_ENGINE: ratio(ACCEPTED, "spec_decode_num_draft_tokens_total", by="engine")},
        "percentunit",
    ),
    Panel(
        "Right, by their place in the draft",
        {"{{position}}": f"{ACCEPTED_AT} / on () group_left {rate(DRAFTS)}"},
        "percentunit",
        help="The share of drafts that were right up to and with this place.",
    ),
    Panel(
        "Drafted tokens",
        {
            "drafted": rate("spec_decode_num_draft_tokens_total"),
            "right": rate(ACCEPTED),
        },
        "tokens/s",
    ),
    Panel("Drafts", {BY_ENGINE: rate(DRAFTS, by="engine")}, "ops"),
]

IMAGES = [
    heatmap("Images of a request", "request_images", MODEL),
    Panel("Requests with images", {"requests": rate("request_images_count", MODEL)}, "reqps"),
    Panel("Requests refused for an image", each("image_refusals_total", "code", MODEL), "reqps"),
    heatmap("Fetching an image", "image_fetch_seconds", MODEL, "s"),
    heatmap("Encoding an image", "image_encode_seconds", unit="s"),
    Panel(
        "Images begun",
        {
            "embeddings were there": rate("image_cache_hits_total"),
            "encoded": rate("images_encoded_total"),
        },
        "ops",
        stacked=True,
        help="Images behind pages that are found again are not begun at all.",
    ),
    Panel("Embeddings kept", {BY_ENGINE: f"rayfin_image_cache_bytes{{{ENGINE}}}"}, "bytes"),
    Panel(
        "Embeddings that made room",
        {"evictions": rate("image_cache_evictions_total")},
        "ops",
        help="If this grows, --mm-encoder-cache-gb is small for the images that come back.",
    ),
]

STRUCTURED_OUTPUT = [
    Panel("Guided requests", each("guided_requests_total", "kind", MODEL), "reqps", stacked=True),
    Panel("Grammars checked", each("grammar_verdicts_total", "verdict", MODEL), "reqps"),
    Panel("Replaced wardens", {"restarts": grown("warden_restarts_total", MODEL)}),
    Panel("Compilation of a grammar", quantiles("grammar_compile_seconds"), "s"),
    Panel("Wait for a grammar", quantiles("grammar_wait_seconds"), "s"),
    Panel("Masks of a step", quantiles("grammar_mask_seconds"), "s"),
    Panel("Grammars in the runners", {BY_ENGINE: f"rayfin_grammars_loaded{{{ENGINE}}}"}),
    Panel(
        "Grammars that the runner had, and had not",
        {
            "hits": rate("grammar_cache_hits_total"),
            "misses": rate("grammar_cache_misses_total"),
        },
        "reqps",
    ),
    Panel("Failures by grammar", each("grammar_failures_total", "reason"), "reqps"),
    Panel("Tool calls", each("tool_calls_total", "choice", MODEL), "ops", stacked=True),
    Panel(
        "Tool calls that are not whole",
        {
            "not parsed": rate("tool_calls_unparsed_total", MODEL),
            "cut off": rate("tool_calls_cut_total", MODEL),
        },
        "ops",
    ),
    Panel(
        "Formats of answers",
        {"calls {{tools}}, thoughts {{reasoning}}": total("output_format", MODEL, TO_READ)},
        help="Ingresses, by the formats of calls and of thoughts.",
    ),
    Panel("Tokens of thoughts", {"tokens": rate("reasoning_tokens_total", MODEL)}, "tokens/s"),
    Panel("Spent budgets", {"thoughts": rate("thinking_budgets_spent_total", MODEL)}, "ops"),
]

ADAPTERS = [
    Panel("Adapters in the runners", {BY_ENGINE: f"rayfin_adapters_resident{{{ENGINE}}}"}),
    Panel("Memory of adapters", {BY_ENGINE: f"rayfin_adapter_bytes{{{ENGINE}}}"}, "bytes"),
    Panel("Evicted", {BY_ENGINE: rate("adapter_evictions_total", by="engine")}, "ops"),
    Panel("Loads", each("adapter_loads_total", "result"), "ops", stacked=True),
    Panel("Load of an adapter", quantiles("adapter_load_seconds"), "s"),
    Panel(
        "Waiting for adapters",
        {
            "adapters": total("adapters_loading"),
            "requests": total("num_requests_waiting_for_adapters"),
        },
        help="Adapters that are being read, and the requests that wait for them beside the queue.",
    ),
]

OF_MODEL = "{{model_name}}"
PER_MODEL = [
    Panel("Answers", {OF_MODEL: rate("http_requests_total", MODEL, "model_name")}, "reqps"),
    Panel(
        "Generated", {OF_MODEL: rate("generation_tokens_total", MODEL, "model_name")}, "tokens/s"
    ),
    Panel("Prompts", {OF_MODEL: rate("prompt_tokens_total", MODEL, "model_name")}, "tokens/s"),
    Panel("Time to first token, p95", {OF_MODEL: quantile(0.95, TTFT, MODEL, "model_name")}, "s"),
    Panel("Between tokens, p95", {OF_MODEL: quantile(0.95, ITL, MODEL, "model_name")}, "s"),
    Panel("Whole request, p95", {OF_MODEL: quantile(0.95, E2E, MODEL, "model_name")}, "s"),
    Panel("Running", {OF_MODEL: total("num_requests_running", MODEL, "model_name")}),
    Panel("Waiting", {OF_MODEL: total("num_requests_waiting", MODEL, "model_name")}),
    Panel(
        "KV cache in use",
        {OF_MODEL: f"avg by (model_name) (rayfin_kv_cache_usage_perc{{{MODEL}}})"},
        "percentunit",
    ),
    Panel(
        "Prompt tokens found in the cache",
        {
            OF_MODEL: ratio(
                "prefix_cache_hits_total", "prefix_cache_queries_total", MODEL, "model_name"
            )
        },
        "percentunit",
    ),
    Panel("Failures", {OF_MODEL: rate("request_failures_total", MODEL, "model_name")}, "reqps"),
    Panel("Engines", {OF_MODEL: f"count by (model_name) (rayfin_engine_epoch{{{MODEL}}})"}),
]

DASHBOARDS = {
    "overview": OVERVIEW,
    "latency": LATENCY,
    "cache": CACHE,
    "scheduler": SCHEDULER,
    "speculation": SPECULATION,
    "reliability": RELIABILITY,
    "structured-output": STRUCTURED_OUTPUT,
    "adapters": ADAPTERS,
    "images": IMAGES,
    "per-model": PER_MODEL,
}


def panel_json(panel: Panel, number: int) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + at),
            "datasource": SOURCE,
            "expr": query,
            "legendFormat": legend,
            **({"format": "heatmap"} if panel.kind == "heatmap" else {}),
        }
        for at, (legend, query) in enumerate(panel.queries.items())
    ]
    column, row = number % 3, number // 3
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none"}
        defaults["custom"] = {"fillOpacity": 30 if panel.stacked else 5, "stacking": stacking}
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": {"x": WIDTH * column, "y": HEIGHT * row, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


def variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard(name: str, panels: Sequence[Panel]) -> dict[str, Any]:
    running = "rayfin_num_requests_running"
    engines = f'label_values({running}{{model_name=~"$model"}}, engine)'
    return {
        "uid": f"rayfin-{name}",
        "title": f"Rayfin / {name.capitalize()}",
        "tags": ["rayfin"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["rayfin"], "title": "Rayfin", "asDropdown": True}
        ],
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                variable("model", f"label_values({running}, model_name)"),
                variable("engine", engines),
            ]
        },
        "panels": [panel_json(panel, number) for number, panel in enumerate(panels)],
    }


def files() -> dict[Path, str]:
    """Returns the text of every generated file, by path."""
    written = {
        HERE / f"{name}.json": json.dumps(dashboard(name, panels), indent=1) + "\n"
        for name, panels in DASHBOARDS.items()
    }
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "rayfin"},
        "spec": yaml.safe_load(RULES.read_text()),
    }
    head = "# Written by k8s/grafana/generate.py from rules/rayfin.yaml.\n"
    written[PROMETHEUS_RULE] = head + yaml.safe_dump(rule, sort_keys=False, width=100)
    return written


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path)
