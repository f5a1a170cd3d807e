"""The fault matrix: what breaks, when, and which failures clients may see.

A case is a function that injects faults under a load. The history checker (history.py) always
applies; a case only states which requests may fail, and with which error codes.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import faults
from batch import batch_under_kills
from cluster import Layout
from coding_agents import MODEL as AGENTS_MODEL
from coding_agents import agent_under_kills
from connected import connected_under_kills
from from_ray import switch_under_load
from history import Record
from load import Ask
from nemesis import Nemesis
from new_weights import (
    FAILPOINTS,
    KEY,
    join_after_updates,
    kill_runner_after_updates,
    update_amid,
    update_in_turn,
    update_while_pages_move,
)

ONE = Layout()
TWO = Layout(engines=2)
ROOMY = Layout(spare=1)
HASTY = Layout(server=(("shutdown_timeout", 2.0),))  # shorter than the streams
PATIENT = Layout(server=(("engine_timeout", 60.0),))
NODES = Layout(engines=2, ingresses=2, workers=2)
HEAD_APART = replace(NODES, driver_apart=True)
REDIS = Layout(engines=1, redis=True)
TIGHT = Layout(pages=96)  # about 1.2 of the longest requests
SMALL_DISK = Layout(temp_bytes=48 * 1024**2, object_store=80 * 1024**2)
MODEL = Layout(runner="model")
MODELS = Layout(engines=2, runner="model")
PREFILL = Layout(runner="model", prefill=1)
MODEL_NODES = replace(NODES, runner="model")
WEIGHTS = Layout(engines=2, runner="model", server=(("admin_api_key", KEY),))
CHECKED = Layout(runner="model", engine=(("check_pages", True),))
ADAPTERS = Layout(runner="model", adapters=3)
ADAPTERS_TWO = replace(ADAPTERS, engines=2)
IMAGES = Layout(
    runner="model",
    images=True,
    engine=(("mm_encoder_cache_gb", 0.0002),),  # 13 of the pictures that all ask about
)
IMAGES_TWO = replace(IMAGES, engines=2)
IMAGES_NODES = replace(NODES, runner="model", images=True, engine=IMAGES.engine)
SPARED = Layout(engine=(("spare_runners", 1),))
SPARED_MODEL = replace(SPARED, runner="model")
RANKS = Layout(runner="model", ranks=2)
CLOCK = Layout(variables=(("CHAOS_CLOCK", "1"),))
BATCHES = Layout(
    batches=True, server=(("batch_concurrency", 8),), engine=(("batch_mode", "share"),)
)
AGENTS = Layout(
    runner="script",
    pages=2**14,
    server=(("served_model_name", AGENTS_MODEL),),
    variables=(("CHAOS_STEP_SECONDS", "0.03"),),
)
BREAKS_OFF = ("broken",)
REFUSED = ("engine_unavailable", "rate_limit_exceeded", "queue_full", "unavailable")


def rpc_failures(method: str, percent: int, kinds: tuple[str, ...], count: int) -> Layout:
    """Makes Ray fail calls: the request, the reply, or both in flight.

    It applies to processes that start after ``Cluster.lose_calls``.
    """
    failures = {"num_failures": count} | {f"{kind}_failure_prob": percent for kind in kinds}
    return Layout(variables=(("CHAOS_RPC", json.dumps({method: failures})),))


PUSH = "CoreWorkerService.grpc_client.PushTask"
LOST_REPLIES = rpc_failures(PUSH, 10, ("resp",), 40)
LOST_CALLS = rpc_failures(PUSH, 8, ("req", "resp", "in_flight"), 40)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the matrix."""

    name: str
    row: str  # number in the fault matrix
    fault: str  # description in the table
    act: Callable[[Nemesis], Awaitable[None]]
    layout: Layout = ONE
    may_fail: tuple[str, ...] = ()  # error codes; "broken": the connection breaks
    may_fail_asks: str = ""  # prefix of the names of requests that may fail
    streams: int = 16
    rate: float = 8.0
    after: float = 4.0  # seconds that the load continues after the last fault
    idle: bool = False  # the fault comes before the load
    renews: bool = False  # the cluster is unusable afterwards
    forms: bool = False  # most streams follow a grammar or call a tool; for real models
    resumes: bool = False  # clients resume broken streams (Last-Event-ID)
    long: bool = False  # it takes --minutes

    def allows(self, ask: Ask, record: Record) -> bool:
        """Whether this fault may make the request fail in this way."""
        if not ask.name.startswith(self.may_fail_asks):
            return False
        why = "broken" if record.broken else record.error
        return why in self.may_fail


def with_a_node(
    name: str,
    row: str,
    fault: str,
    act: Callable[[Nemesis], Awaitable[None]],
    layout: Layout = NODES,
) -> Case:
    """A fault that ends a whole node: its engine and its ingress' connections."""
    return Case(
        name,
        row,
        fault,
        act,
        layout,
        BREAKS_OFF + REFUSED,
        "short",
        resumes=True,
        after=10,
        renews=True,
    )


def with_batch(name: str, lines: int, kills: int) -> Case:
    """A batch beside short requests: each line has one answer, and it is the oracle's."""
    return Case(
        name,
        "54",
        f"worker, ingress, scheduler or runner killed at {kills} points of a batch of {lines}",
        batch_under_kills(lines, kills),
        BATCHES,
        BREAKS_OFF + REFUSED,
        "short",
        streams=0,
        rate=1,
        long=kills > 10,
    )


def with_agent(name: str, program: str) -> Case:
    """A published coding agent whose task ends as if nothing had been killed."""
    fault = f"runner, scheduler, ingress, supervisor and proxy killed in turns of {program}'s"
    act = agent_under_kills(name)
    return Case(f"agents-{name}", "58", fault, act, AGENTS, streams=0, rate=0, after=0)


def with_forms(
    name: str,
    fault: str,
    act: Callable[[Nemesis], Awaitable[None]],
    layout: Layout = MODEL,
) -> Case:
    """A fault amid streams of JSON and of tool calls; clients resume those that break off."""
    return Case(
        f"forms-{name}",
        "53",
        f"{fault} amid streams of JSON and tool calls",
        act,
        layout,
        BREAKS_OFF + REFUSED if layout.ingresses > 1 else (),
        "short",
        streams=8,
        rate=2,
        after=8,
        resumes=layout.ingresses > 1,
        forms=True,
    )


def with_adapters(
    name: str,
    fault: str,
    act: Callable[[Nemesis], Awaitable[None]],
    layout: Layout = ADAPTERS,
) -> Case:
    """A fault amid streams of the base model and of three adapters."""
    text = f"{fault} amid streams of three adapters and the base model"
    return Case(f"adapters-{name}", "55", text, act, layout, streams=8, rate=2, after=8)


def with_new_weights(failpoint: str) -> Case:
    """An update of weights amid streams, and a death at one point of its course."""
    fault = f"a process killed at {failpoint} of new weights for two engines"
    act = update_amid(failpoint, "keep")
    return Case(f"weights-{failpoint}", "64", fault, act, WEIGHTS, streams=16, rate=2, after=8)


def with_new_weights_alone(failpoint: str) -> Case:
    """The same of one engine, which lets its streams finish before."""
    fault = f"a process killed at {failpoint} of new weights for one engine, mode wait"
    act, layout = update_amid(failpoint, "wait"), replace(WEIGHTS, engines=1)
    return Case(f"weights-alone-{failpoint}", "64", fault, act, layout, streams=16, rate=2, after=8)


def with_many_weights(
    name: str, fault: str, act: Callable[[Nemesis], Awaitable[None]], layout: Layout = WEIGHTS
) -> Case:
    """Several updates of weights amid streams."""
    return Case(f"weights-{name}", "64", fault, act, layout, streams=16, rate=2, after=8)


def with_images(
    name: str,
    fault: str,
    act: Callable[[Nemesis], Awaitable[None]],
    layout: Layout = IMAGES,
) -> Case:
    """A fault amid streams about pictures; clients resume those that break off."""
    apart = layout.ingresses > 1
    return Case(
        f"images-{name}",
        "56",
        f"{fault} amid streams about pictures",
        act,
        layout,
        BREAKS_OFF + REFUSED if apart else (),
        "short",
        streams=8,
        rate=2,
        after=8,
        resumes=apart,
    )


CASES = [
    Case("runner-idle", "1", "runner killed, nothing runs", faults.kill_runner, idle=True),
    Case(
        "runner-prefill",
        "2",
        "runner killed while prompts are computed",
        faults.kill_runner_in_prefill,
    ),
    Case("runner-decode", "3, 5", "the only runner killed mid-stream", faults.kill_runner),
    Case("runner-decode-two", "3", "one of two runners killed mid-stream", faults.kill_runner, TWO),
    Case(
        "runner-spare",
        "3, 5",
        "the only runner killed mid-stream, with a spare",
        faults.kill_runner_with_a_spare,
        SPARED,
    ),
    Case(
        "runner-spare-model",
        "3, 5",
        "the only runner killed mid-stream, with a spare, the demo model",
        faults.kill_runner_with_a_spare,
        SPARED_MODEL,
        streams=8,
        rate=2,
    ),
    Case(
        "runner-reply",
        "4",
        "runner killed between compute and reply",
        faults.kill_runner_before_reply,
    ),
    Case(
        "runner-recovery",
        "6",
        "its successor killed too, twice",
        faults.kill_runner_and_its_successor,
    ),
    Case("runner-often", "6", "runner killed every 5 s", faults.kill_runner_every_five_seconds),
    Case("runner-paused", "7", "runner stopped for 2 s", faults.stop_runner_briefly),
    Case("runner-stopped", "7", "runner stopped for 25 s, then woken", faults.stop_runner_for_long),
    Case("runner-hangs", "8", "runner hangs for 20 s, its interpreter held", faults.hang_runner),
    Case("runner-waits", "15", "runner waits for ever in a step", faults.wait_for_ever),
    Case("rank", "14", "one of two ranks killed", faults.kill_runner, RANKS),
    Case(
        "rank-stopped",
        "14",
        "one of two ranks stopped for 25 s, then woken",
        faults.stop_runner_for_long,
        RANKS,
    ),
    Case("rank-slow", "14", "one of two ranks 5 times slower", faults.slow_runner_of_two, RANKS),
    Case(
        "rank-diverges",
        "15",
        "one of two ranks leaves a sum out",
        faults.leave_a_sum_out,
        RANKS,
    ),
    Case("page", "16", "a bit of a shared page flips", faults.flip_a_bit_of_a_page, CHECKED),
    Case(
        "row-fails",
        "9",
        "one request raises in the step",
        faults.fail_row,
        may_fail=("engine_error",),
        may_fail_asks="poison",
    ),
    Case(
        "row-spoiled",
        "13",
        "one request's logits are not numbers",
        faults.spoil_row,
        may_fail=("numerical_error",),
        may_fail_asks="poison",
    ),
    Case("step-fails", "10", "a whole step raises", faults.fail_step),
    Case(
        "device-lost",
        "11, 51",
        "every step of a runner's process fails",
        faults.fail_every_step_of_a_runner,
    ),
    Case("out-of-memory", "12", "a step runs out of memory", faults.run_out_of_memory),
    Case(
        "memory-limit",
        "12",
        "the runner may take no memory more",
        faults.limit_memory_of_runner,
        renews=True,
    ),
    Case("scheduler", "17", "scheduler killed", faults.kill_scheduler),
    Case("scheduler-two", "17", "one of two schedulers killed", faults.kill_scheduler, TWO),
    Case(
        "scheduler-late",
        "17",
        "scheduler killed, its successor begins 24 s later",
        faults.kill_scheduler_with_a_late_successor,
        PATIENT,
        after=8,
    ),
    Case("scheduler-paused", "18", "scheduler stopped for 3 s", faults.stop_scheduler_briefly),
    Case("scheduler-slow", "18", "scheduler 200 ms slower each turn", faults.slow_scheduler),
    Case("scheduler-zombie", "19", "scheduler stopped for 25 s, then woken", faults.two_schedulers),
    Case("supervisor", "17", "supervisor (Serve replica) killed", faults.kill_supervisor),
    Case(
        "ingress",
        "20",
        "one of two ingresses killed",
        faults.kill_ingress,
        NODES,
        BREAKS_OFF + REFUSED,
        "short",
        resumes=True,
    ),
    Case(
        "proxy",
        "21",
        "one of three proxies killed",
        faults.kill_proxy,
        NODES,
        BREAKS_OFF + REFUSED,
        "short",
        resumes=True,
    ),
    Case("controller", "22", "Serve's controller killed", faults.kill_controller),
    with_a_node(
        "raylet",
        "23",
        "raylet of a runner's node killed",
        faults.kill_raylet_of_runner,
    ),
    with_a_node(
        "raylet-head",
        "23",
        "raylet of the head killed",
        faults.kill_raylet_of_head,
        HEAD_APART,
    ),
    with_a_node(
        "raylet-term",
        "43",
        "SIGTERM to the raylet of a runner's node",
        faults.terminate_raylet_of_runner,
    ),
    with_a_node(
        "node",
        "28",
        "a node with a runner lost",
        faults.lose_node_of_runner,
    ),
    Case("gcs", "24", "GCS killed, back in 10 s", faults.restart_gcs, REDIS),
    Case(
        "gcs-runner",
        "25",
        "a runner killed while the GCS is away",
        faults.gcs_away_and_runner_killed,
        REDIS,
        after=8,
    ),
    Case(
        "partition",
        "29",
        "all between scheduler and runner lost for 2 s",
        faults.cut_off_runner_briefly,
    ),
    with_a_node(
        "node-cut",
        "29",
        "a node with a runner stopped for 10 s, then woken",
        faults.cut_off_node,
    ),
    Case("step-lost", "29, 30", "a step is lost on its way", faults.lose_step),
    Case("answer-lost", "30", "an answer is lost on its way", faults.lose_answer),
    Case("step-twice", "30", "a step is sent twice", faults.send_steps_twice),
    Case(
        "rpc-replies",
        "30",
        "scheduler killed; 10 % of its successor's calls lose their replies",
        faults.lose_calls,
        LOST_REPLIES,
        renews=True,
    ),
    Case(
        "rpc",
        "31",
        "scheduler killed; 24 % of its successor's calls fail",
        faults.lose_calls,
        LOST_CALLS,
        renews=True,
    ),
    Case(  # spilled objects may stay on disk after their owner's death
        "object-store",
        "33",
        "object store full",
        faults.fill_object_store,
        SMALL_DISK,
        renews=True,
    ),
    Case("disk", "34", "disk of logs and sockets full", faults.fill_disk, SMALL_DISK),
    Case(
        "disk-runner",
        "34",
        "disk full for 9 s, runner killed meanwhile",
        faults.fill_disk_and_kill_runner,
        SMALL_DISK,
        renews=True,
    ),
    Case(
        "files",
        "35",
        "no file descriptor left in the proxy for 3 s",
        faults.run_out_of_files,
        may_fail=BREAKS_OFF + REFUSED,
        after=6,
    ),
    Case("move-drain", "65", "engines drain in turn, streams move", faults.drain_in_turn, MODELS),
    Case("move-killed", "65", "runner killed amid moves", faults.drain_and_kill, MODELS),
    Case(
        "move-torn",
        "65",
        "pages are torn and bits of them flip while streams move",
        faults.drain_with("drop@p:0.1", "flip@p:0.02"),
        MODELS,
    ),
    Case(
        "move-slow",
        "65",
        "each page takes half a second while streams move",
        faults.drain_with("sleep:0.5"),
        MODELS,
    ),
    Case(
        "move-source",
        "65",
        "runners killed that are about to send a page",
        faults.drain_with("exit@nth:20"),
        MODELS,
    ),
    Case(
        "move-prefill",
        "65",
        "runner killed that computes prompts for others, then that of the others",
        faults.kill_engine_with_prompts_of_others,
        PREFILL,
    ),
    Case("straggler", "36", "runner 5 times slower", faults.slow_runner),
    Case(
        "straggler-two",
        "36",
        "one of two runners 5 times slower",
        faults.slow_runner_of_two,
        TWO,
    ),
    Case(
        "poison",
        "37",
        "a request that kills its runner",
        faults.poison,
        may_fail=("engine_error", "request_quarantined"),
        may_fail_asks="poison",
    ),
    Case(
        "poison-loop",
        "38",
        "the same once a second",
        faults.poison_again_and_again,
        may_fail=("engine_error", "request_quarantined"),
        may_fail_asks="poison",
    ),
    Case("scale", "42", "an engine less, and one more again", faults.scale, TWO),
    Case("update", "39", "rolling update under load", faults.update, ROOMY),
    Case(
        "bad-version",
        "40, 41",
        "update to a version that cannot load",
        faults.update_to_a_bad_version,
        ROOMY,
        renews=True,
    ),
    Case(
        "update-full",
        "39",
        "rolling update, no room for both engines, a drain of 2 s",
        faults.update,
        HASTY,
    ),
    Case(
        "bad-version-full",
        "40, 41",
        "update to a version that cannot load, no room for both engines",
        faults.update_to_a_bad_version,
        may_fail=REFUSED,
        renews=True,
    ),
    Case("clock", "44", "wall clocks an hour ahead, then behind", faults.turn_clocks, CLOCK),
    Case(
        "wrong-token",
        "32, 52",
        "a job and a node with another cluster's token ask to be let in",
        faults.knock_with_a_wrong_token,
    ),
    Case("scrape", "45", "21 scrapers of /metrics", faults.scrape),
    Case("slow-readers", "46", "100 clients that read nothing", faults.slow_readers),
    Case(
        "herd", "47", "runner killed, 1000 clients at once", faults.herd, may_fail=REFUSED, after=8
    ),
    Case("disconnects", "48", "100 clients leave at random", faults.disconnects),
    Case(
        "preemptions",
        "49",
        "pages for 1.2 requests",
        faults.wait_under_load,
        TIGHT,
        after=8,
        streams=8,
        rate=2,
    ),
    with_batch("batch", lines=200, kills=6),
    with_batch("batch-long", lines=500, kills=20),
    Case(
        "connect",
        "63",
        "scheduler or runner killed 6 times under a program that is connected without HTTP",
        connected_under_kills(streams=12, kills=6),
        streams=4,
        rate=2,
        after=8,
    ),
    Case(
        "from_ray",
        "66",
        "another application switched to Rayfin in three deploys, as from Ray Serve LLM",
        switch_under_load(streams=8, requests=1000),
        Layout(spare=2),
        streams=0,
        rate=0,
        after=0,
    ),
    with_forms("runner", "runner killed", faults.kill_runner),
    with_forms("runner-often", "runner killed every 5 s", faults.kill_runner_every_five_seconds),
    with_forms("scheduler", "scheduler killed", faults.kill_scheduler),
    with_forms("engine", "one of two engines killed", faults.kill_scheduler_and_runner, MODELS),
    with_forms("ingress", "one of two ingresses killed", faults.kill_ingress, MODEL_NODES),
    with_adapters("runner", "runner killed", faults.kill_runner),
    with_adapters("scheduler", "scheduler killed", faults.kill_scheduler),
    with_adapters("registry", "registry of adapters and runner killed", faults.kill_registry),
    with_adapters(
        "engine", "one of two engines killed", faults.kill_scheduler_and_runner, ADAPTERS_TWO
    ),
    *map(with_new_weights, FAILPOINTS),
    *map(with_new_weights_alone, FAILPOINTS),
    with_many_weights("in-turn", "new weights of one engine after the other", update_in_turn),
    with_many_weights(
        "moving",
        "new weights again and again while engines drain in turn and pages move",
        update_while_pages_move,
    ),
    with_many_weights("after", "a runner killed after 3 updates", kill_runner_after_updates),
    with_many_weights(
        "joiner",
        "an engine that comes after 2 updates",
        join_after_updates,
        replace(WEIGHTS, engines=1, spare=1),
    ),
    with_agent("claude", "Claude Code"),
    with_agent("codex", "Codex"),
    with_images("runner", "runner killed", faults.kill_runner),
    with_images("encoded", "runner killed with an image encoded", faults.kill_runner_with_an_image),
    with_images("runner-often", "runner killed every 5 s", faults.kill_runner_every_five_seconds),
    with_images("scheduler", "scheduler killed", faults.kill_scheduler),
    with_images(
        "engine", "one of two engines killed", faults.kill_scheduler_and_runner, IMAGES_TWO
    ),
    with_images("ingress", "one of two ingresses killed", faults.kill_ingress, IMAGES_NODES),
]


def headlines(minutes: float) -> list[Case]:
    """The promise of the README: a runner is killed every 20 seconds for a long time."""

    async def kill_on(nemesis: Nemesis) -> None:
        await nemesis.kill_every("runner", 20, 60 * minutes)

    def case(name: str, engines: str, layout: Layout) -> Case:
        fault = f"a runner killed every 20 s for {minutes:g} min, {engines}"
        return Case(name, "6", fault, kill_on, layout, streams=32, after=10, long=True)

    one, two = case("headline-one", "one engine", ONE), case("headline-two", "two engines", TWO)
    model = case("headline-model", "one engine, the demo model", MODEL)
    return [one, two, model, _drains(minutes)]


def _drains(minutes: float) -> Case:
    async def drain_on(nemesis: Nemesis) -> None:
        for _ in range(round(3 * minutes)):
            await faults.drain_in_turn(nemesis, times=1)
            await asyncio.sleep(15)

    fault = f"an engine drained every 20 s for {minutes:g} min, two engines"
    return Case("headline-move", "65", fault, drain_on, MODELS, after=10, long=True)


def all_cases(minutes: float = 1.0) -> list[Case]:
    """Returns every case; each headline case takes ``minutes``."""
    return [*CASES, *headlines(minutes)]
