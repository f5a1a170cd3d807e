"""What the scheduler knows of its requests, as plain data."""

from dataclasses import dataclass, field

from rayfin.actors.config import EngineConfig
from rayfin.actors.plugins import read_tokens
from rayfin.actors.scheduler.counters import EngineCounters
from rayfin.actors.scheduler.queues.background_queue import BackgroundQueue
from rayfin.actors.scheduler.queues.queue_limits import CompletionRate, QueueLimits
from rayfin.actors.scheduler.queues.waiting_queue import make_queue
from rayfin.actors.scheduler.repetition import RepetitionWatch
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.runner_diff import PageMoves, RunnerDiff
from rayfin.actors.scheduler.running_table import RunningTable
from rayfin.actors.scheduler.state_snapshots import StateSnapshots
from rayfin.actors.step_cost import PromptCost
from rayfin.cache.page_tables import PageTables
from rayfin.cache.window_tables import WindowTables


@dataclass(slots=True, eq=False)
class SchedulerState:
    """The one copy of every table. ``Lifecycle`` has the verbs that change several of them."""

    running: RunningTable
    tables: PageTables
    waiting: BackgroundQueue
    queue_limits: QueueLimits
    counters: EngineCounters
    moves: PageMoves = field(default_factory=PageMoves)
    runner_diff: RunnerDiff = field(default_factory=RunnerDiff)
    completion_rate: CompletionRate = field(default_factory=CompletionRate)
    repetitions: RepetitionWatch = field(default_factory=RepetitionWatch)
    prompt_cost: PromptCost = field(default_factory=PromptCost)  # of this engine's runners
    live: dict[tuple[str, int], Request] = field(default_factory=dict)  # by (client, key)
    arrivals: int = 0  # requests that have come
    clients: dict[str, int] = field(default_factory=dict)  # name -> number in RunningTable.client
    # Admissions up to this one need no second requeue: all of their time were requeued already.
    requeued_admission: int = 0
    recurrent: bool = False  # runners keep a state by slot
    snapshots: StateSnapshots | None = None  # of such states, with a prefix cache
    # Pages of host memory: of requests that were preempted, and of the prefix cache.
    host: PageTables | None = None


def _make_tables(config: EngineConfig) -> PageTables:
    sizes = config.limits.max_decoding_batch, config.num_pages, config.page_size
    if config.windows is None:
        return PageTables(*sizes, prefix_caching=config.prefix_caching)
    return WindowTables(*sizes, config.windows, prefix_caching=config.prefix_caching)


def _make_host(config: EngineConfig) -> PageTables | None:
    offloads = config.num_offloaded_pages > 0
    if not (count := config.num_host_pages + config.num_offloaded_pages):
        return None
    return PageTables(0, count, config.page_size, prefix_caching=offloads)


def make_state(config: EngineConfig) -> SchedulerState:
    """The state of an engine without requests."""
    slots = config.limits.max_decoding_batch
    return SchedulerState(
        running=RunningTable(slots, config.max_model_len),
        tables=_make_tables(config),
        host=_make_host(config),
        waiting=make_queue(config),
        queue_limits=QueueLimits(config.max_waiting_requests, config.max_waiting_tokens),
        counters=EngineCounters(config.max_model_len),
        recurrent=config.recurrent,
        snapshots=StateSnapshots(config.num_snapshots, config.page_size)
        if config.num_snapshots
        else None,
        runner_diff=RunnerDiff(
            send_history=config.send_history
            or config.num_speculative_tokens > 0
            or read_tokens(config.plugins)
        ),
    )
