"""The faults of the fault matrix, each a function of a Nemesis."""

import asyncio
import resource
import signal
import time
from collections.abc import Awaitable, Callable

import ray
from cluster import suppressed
from nemesis import Nemesis

from rayfin.actors.messages import Command

POISON = 100
"""A token that is in no other prompt and that the hash runner never generates."""

LATE_SECONDS = 24  # longer than the runners' lease

JOB = "import ray; ray.init(address='{address}', log_to_driver=False); print('inside', flush=True)"
NODE = """
import ray
from ray._private.node import Node
from ray._private.parameter import RayParams

Node(RayParams(gcs_address="{address}", num_cpus=1, object_store_memory=80 * 1024**2), head=False)
print("inside", flush=True)
"""
"""Programs that try to join a cluster."""


async def kill_runner(nemesis: Nemesis) -> None:
    nemesis.kill("runner")


async def kill_runner_with_a_spare(nemesis: Nemesis) -> None:
    """Kills the runner when its spare is ready, which must take over."""
    cluster = nemesis.cluster
    await nemesis.until(lambda: [s.spare_runners for s in cluster.stats()] == [1], "a spare")
    known, serving = set(cluster.pids("runner")), cluster.serving()
    nemesis.signal(serving, signal.SIGKILL)
    successors: set[int] = set()

    def replaced() -> bool:
        successors.update(set(cluster.serving()) - set(serving))
        return bool(successors)

    await nemesis.until(replaced, "a runner serves")
    if not successors <= known:
        nemesis.complaints.append("no spare has taken over")


async def kill_runner_in_prefill(nemesis: Nemesis) -> None:
    for _ in range(8):
        nemesis.load.start(nemesis.load.asks.long_prompt(2000))
    await asyncio.sleep(0.05)
    nemesis.kill("runner")


async def kill_runner_before_reply(nemesis: Nemesis) -> None:
    nemesis.plant_once("runner.before_reply=exit@nth:5")
    await asyncio.sleep(5)
    nemesis.plant("")


async def kill_runner_with_an_image(nemesis: Nemesis) -> None:
    """Kills the runner between an image's encoding and the step that reads the embeddings."""
    nemesis.plant_once("runner.image=exit@nth:3")
    for _ in range(4):
        nemesis.load.start(nemesis.load.asks.looking(new=True))
    await asyncio.sleep(5)
    nemesis.plant("")


async def kill_runner_and_its_successor(nemesis: Nemesis) -> None:
    """Kills the next runner while it loads, and the one after that in its first step."""
    nemesis.plant_once("runner.load=exit", "runner.before_execute=exit")
    nemesis.kill("runner")
    await asyncio.sleep(8)
    nemesis.plant("")


async def kill_runner_every_five_seconds(nemesis: Nemesis) -> None:
    await nemesis.kill_every("runner", 5, 20)


async def stop_runner_briefly(nemesis: Nemesis) -> None:
    await nemesis.pause("runner", 2)


async def stop_runner_for_long(nemesis: Nemesis) -> None:
    await nemesis.pause("runner", 25)


async def hang_runner(nemesis: Nemesis) -> None:
    nemesis.plant_once("runner.before_execute=hang:20")
    await asyncio.sleep(22)
    nemesis.plant("")


async def wait_for_ever(nemesis: Nemesis) -> None:
    """Blocks a runner after a step, as in a collective that another rank never joins."""
    nemesis.plant_once("runner.before_reply=sleep:60")
    await asyncio.sleep(12)
    nemesis.plant("")


async def leave_a_sum_out(nemesis: Nemesis) -> None:
    """Drops a sum, so that ranks diverge or wait for each other for ever."""
    await _replaces_runners(nemesis, "peers.sum=drop@nth:20")


async def flip_a_bit_of_a_page(nemesis: Nemesis) -> None:
    """Flips a bit of a page that the next request with the same prefix reads."""
    await _replaces_runners(nemesis, "runner.page=flip")


async def _replaces_runners(nemesis: Nemesis, fault: str) -> None:
    """The fault must be detected, and all runners replaced."""
    runners, before = nemesis.cluster.pids, set(nemesis.cluster.pids("runner"))
    nemesis.plant_once(fault)
    await nemesis.until(lambda: (now := set(runners("runner"))) and not now & before, "new runners")
    nemesis.plant("")


async def fail_row(nemesis: Nemesis) -> None:
    """Sends one request, named ``poison``, whose row raises."""
    nemesis.plant(f"runner.row=raise@token:{POISON}")
    await nemesis.must_fail(nemesis.load.asks.poison(POISON))
    nemesis.plant("")


async def spoil_row(nemesis: Nemesis) -> None:
    """Sends one request whose logits are NaN."""
    nemesis.plant(f"runner.row=nan@token:{POISON}")
    await nemesis.must_fail(nemesis.load.asks.poison(POISON))
    nemesis.plant("")


async def fail_step(nemesis: Nemesis) -> None:
    nemesis.plant_once("runner.before_execute=raise@nth:3")
    await asyncio.sleep(5)
    nemesis.plant("")


async def fail_every_step_of_a_runner(nemesis: Nemesis) -> None:
    """As after an illegal memory access on a GPU: each later call of that process fails too."""
    epochs = [stats.epoch for stats in nemesis.cluster.stats()]
    nemesis.plant(f"runner.before_execute=raise@epoch:{max(epochs)}")
    await asyncio.sleep(6)
    nemesis.plant("")


async def run_out_of_memory(nemesis: Nemesis) -> None:
    nemesis.plant_once("runner.before_execute=oom@nth:2")
    await asyncio.sleep(5)
    nemesis.plant("")


async def limit_memory_of_runner(nemesis: Nemesis) -> None:
    """Forbids the runner more address space."""
    for pid in nemesis.cluster.pids("runner"):
        nemesis.limit(pid, resource.RLIMIT_AS, 2**20)
    await asyncio.sleep(8)


async def kill_scheduler(nemesis: Nemesis) -> None:
    nemesis.kill("scheduler")


async def kill_scheduler_with_a_late_successor(nemesis: Nemesis) -> None:
    """The successor comes when the lease of the runners is over; they must have their weights."""
    runners = await asyncio.to_thread(nemesis.cluster.pids, "runner")
    nemesis.plant_once(f"scheduler.start=sleep:{LATE_SECONDS}")
    nemesis.kill("scheduler")
    await asyncio.sleep(LATE_SECONDS + 4)
    nemesis.plant("")
    if await asyncio.to_thread(nemesis.cluster.pids, "runner") != runners:
        nemesis.complaints.append("the runners did not wait for the next scheduler")


async def kill_registry(nemesis: Nemesis) -> None:
    """Kills the actor that holds the files of adapters, and then those that read them."""
    nemesis.kill("registry")
    nemesis.kill("runner")


async def kill_scheduler_and_runner(nemesis: Nemesis) -> None:
    """Kills all of an engine but its supervisor; of several engines, one."""
    nemesis.signal(nemesis.cluster.engine(), signal.SIGKILL)


async def stop_scheduler_briefly(nemesis: Nemesis) -> None:
    await nemesis.pause("scheduler", 3)


async def slow_scheduler(nemesis: Nemesis) -> None:
    nemesis.plant("scheduler.tick=sleep:0.2")
    await asyncio.sleep(8)
    nemesis.plant("")


async def two_schedulers(nemesis: Nemesis) -> None:
    """Stops the scheduler until it has been replaced, then wakes it."""
    await nemesis.pause("scheduler", 25)


async def kill_ingress(nemesis: Nemesis) -> None:
    nemesis.kill("ingress")


async def kill_proxy(nemesis: Nemesis) -> None:
    nemesis.kill("proxy")


async def kill_controller(nemesis: Nemesis) -> None:
    nemesis.kill("controller")
    await asyncio.sleep(5)


async def kill_supervisor(nemesis: Nemesis) -> None:
    nemesis.kill("engine")
    await asyncio.sleep(5)


async def kill_raylet_of_runner(nemesis: Nemesis) -> None:
    nemesis.kill_raylet(_index_of(nemesis, "runner"))
    await asyncio.sleep(15)


async def kill_raylet_of_head(nemesis: Nemesis) -> None:
    """Ends Serve's controller and all else on the head but the GCS."""
    nemesis.kill_raylet(0)
    await asyncio.sleep(15)


async def terminate_raylet_of_runner(nemesis: Nemesis) -> None:
    """Sends SIGTERM, as Kubernetes does to a pod."""
    node = nemesis.cluster.nodes[_index_of(nemesis, "runner")]
    (raylet,) = node.all_processes["raylet"]
    nemesis.signal([raylet.process.pid], signal.SIGTERM)
    await asyncio.sleep(15)


async def lose_node_of_runner(nemesis: Nemesis) -> None:
    nemesis.lose_node(_index_of(nemesis, "runner"))
    await asyncio.sleep(15)


async def restart_gcs(nemesis: Nemesis) -> None:
    await nemesis.restart_gcs(10)
    await asyncio.sleep(5)


async def gcs_away_and_runner_killed(nemesis: Nemesis) -> None:
    runner = nemesis.cluster.pids("runner")
    restart = asyncio.create_task(nemesis.restart_gcs(10))
    await asyncio.sleep(3)
    nemesis.signal(runner, signal.SIGKILL)
    await restart
    await asyncio.sleep(10)


async def cut_off_runner_briefly(nemesis: Nemesis) -> None:
    """Drops all messages in both directions for 2 s."""
    nemesis.plant("group.submit=drop;group.reply=drop")
    await asyncio.sleep(2)
    nemesis.plant("")
    await asyncio.sleep(6)


async def cut_off_node(nemesis: Nemesis) -> None:
    """Cuts a node off for 10 s; it then sends what it was about to send.

    Its processes are stopped, for cutting the network needs root.
    """
    await nemesis.stop_node(_index_of(nemesis, "runner"), 10)
    await asyncio.sleep(8)


async def lose_step(nemesis: Nemesis) -> None:
    nemesis.plant_once("group.submit=drop@nth:5")
    await asyncio.sleep(5)
    nemesis.plant("")


async def lose_answer(nemesis: Nemesis) -> None:
    nemesis.plant_once("group.reply=drop@nth:5")
    await asyncio.sleep(5)
    nemesis.plant("")


async def send_steps_twice(nemesis: Nemesis) -> None:
    nemesis.plant_once("group.submit=duplicate@nth:5")
    await asyncio.sleep(5)
    nemesis.plant("")


async def wait_under_load(nemesis: Nemesis) -> None:
    """Waits: the layout is the fault."""
    nemesis.strike()
    await asyncio.sleep(8)


async def lose_calls(nemesis: Nemesis) -> None:
    """Replaces the scheduler by one whose process has Ray's RPC failures enabled."""
    nemesis.cluster.lose_calls()
    deadline = time.monotonic() + 90
    while not any(map(nemesis.cluster.loses_calls, nemesis.cluster.pids("scheduler"))):
        if time.monotonic() > deadline:
            raise TimeoutError("no scheduler fails calls")
        nemesis.kill("scheduler")
        await asyncio.sleep(6)
    await asyncio.sleep(15)


async def fill_object_store(nemesis: Nemesis) -> None:
    filler = nemesis.fill_object_store(300)
    await asyncio.sleep(12)
    filler.kill()
    filler.wait()


async def fill_disk(nemesis: Nemesis) -> None:
    nemesis.fill_disk()
    await asyncio.sleep(8)
    nemesis.empty_disk()


async def fill_disk_and_kill_runner(nemesis: Nemesis) -> None:
    """No process can start until the disk has room again."""
    nemesis.fill_disk()
    await asyncio.sleep(1)
    nemesis.kill("runner")
    await asyncio.sleep(8)
    nemesis.empty_disk()
    await asyncio.sleep(8)


async def run_out_of_files(nemesis: Nemesis) -> None:
    """Forbids the proxy more files and sockets for 3 s."""
    (pid, *_) = nemesis.cluster.pids("proxy")
    before, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    nemesis.limit(pid, resource.RLIMIT_NOFILE, 64)
    await asyncio.sleep(3)
    nemesis.limit(pid, resource.RLIMIT_NOFILE, before)


async def slow_runner(nemesis: Nemesis) -> None:
    nemesis.plant("runner.before_execute=sleep:0.1")
    await asyncio.sleep(8)
    nemesis.plant("")


async def slow_runner_of_two(nemesis: Nemesis) -> None:
    await nemesis.slow_down("runner", 12)


async def poison(nemesis: Nemesis) -> None:
    """Sends a request that kills every runner that runs it."""
    nemesis.plant(f"runner.before_execute=exit@token:{POISON}")
    await nemesis.must_fail(nemesis.load.asks.poison(POISON))
    nemesis.plant("")


async def poison_again_and_again(nemesis: Nemesis) -> None:
    nemesis.plant(f"runner.before_execute=exit@token:{POISON}")
    ask = nemesis.load.asks.poison(POISON)
    tasks = []
    for _ in range(15):
        tasks.append(asyncio.create_task(nemesis.must_fail(ask)))
        await asyncio.sleep(1)
    await asyncio.gather(*tasks)
    nemesis.plant("")


async def update(nemesis: Nemesis) -> None:
    """Redeploys with another setting, which replaces engines and ingresses."""
    nemesis.strike()
    await asyncio.to_thread(nemesis.cluster.deploy, max_decoding_batch=60)
    await asyncio.sleep(2)


async def scale(nemesis: Nemesis) -> None:
    """Removes one engine, and adds one again."""
    nemesis.strike()
    await asyncio.to_thread(nemesis.cluster.deploy, 1)
    await asyncio.sleep(3)
    nemesis.strike()
    await asyncio.to_thread(nemesis.cluster.deploy, 2)
    await asyncio.sleep(3)


async def update_to_a_bad_version(nemesis: Nemesis) -> None:
    """Deploys a version whose runners cannot load, then the old one."""
    nemesis.plant("runner.load=raise")
    with suppressed():
        await asyncio.wait_for(asyncio.to_thread(nemesis.cluster.deploy, max_decoding_batch=50), 40)
    nemesis.plant("")
    await asyncio.to_thread(nemesis.cluster.deploy)


async def drain_in_turn(nemesis: Nemesis, *, kill: bool = False, times: int = 4) -> None:
    """Drains one engine after the other, whose streams move; or kills it amid that."""
    for _ in range(times):
        scheduler = nemesis.random.choice(nemesis.cluster.schedulers())
        pids = [runner.pid for runner in ray.get(scheduler.runners.remote(), timeout=30)]
        nemesis.strike()
        await scheduler.manage.remote(Command.DRAIN)
        if kill:
            await asyncio.sleep(nemesis.random.uniform(0.0, 1.5))
            nemesis.signal(pids, signal.SIGKILL)
        await asyncio.sleep(5)
        await scheduler.manage.remote(Command.ADMIT)


async def drain_and_kill(nemesis: Nemesis) -> None:
    await drain_in_turn(nemesis, kill=True)


def drain_with(*planted: str) -> Callable[[Nemesis], Awaitable[None]]:
    """Drains one engine after the other, while their pages come as failpoints have them."""

    async def act(nemesis: Nemesis) -> None:
        nemesis.plant(";".join(f"runner.record={fault}" for fault in planted))
        await drain_in_turn(nemesis)
        nemesis.plant("")

    return act


async def kill_engine_with_prompts_of_others(nemesis: Nemesis) -> None:
    """Kills the runner that computes long prompts for another engine, then that one's."""
    for name in ("prefill-0", "0"):
        for _ in range(6):
            nemesis.load.start(nemesis.load.asks.long_prompt(2000))
        await asyncio.sleep(nemesis.random.uniform(0.2, 1.0))
        engines = nemesis.cluster.engines()
        (scheduler,) = (handle for engine, handle in engines.items() if engine.endswith(f"/{name}"))
        pids = [runner.pid for runner in ray.get(scheduler.runners.remote(), timeout=30)]
        nemesis.signal(pids, signal.SIGKILL)
        await asyncio.sleep(6)


async def turn_clocks(nemesis: Nemesis) -> None:
    """Shifts the wall clocks of the cluster's Python processes; monotonic clocks are unchanged."""
    for hours in (1, -1, 0):
        nemesis.set_clock(3600.0 * hours)
        await asyncio.sleep(5)


async def knock_with_a_wrong_token(nemesis: Nemesis) -> None:
    """Tries to join a job and a node; only a job with the right token may."""
    wrong, nodes = "0" * 32, nemesis.cluster.living_nodes()
    right, job, node = await asyncio.gather(
        nemesis.enters(JOB, None), nemesis.enters(JOB, wrong), nemesis.enters(NODE, wrong)
    )
    if not right:
        nemesis.complaints.append("the right token was refused")
    if job or node or nemesis.cluster.living_nodes() != nodes:
        nemesis.complaints.append("a wrong token was accepted")


async def scrape(nemesis: Nemesis) -> None:
    """Reads /metrics with 21 clients, each once a second."""
    await nemesis.scrape(21, 8)


async def slow_readers(nemesis: Nemesis) -> None:
    await nemesis.slow_readers(100, 10)


async def herd(nemesis: Nemesis) -> None:
    nemesis.kill("runner")
    await nemesis.herd(1000)


async def disconnects(nemesis: Nemesis) -> None:
    await nemesis.disconnects(100, 6)


def _index_of(nemesis: Nemesis, what: str) -> int:
    """Index of a worker node that runs an actor of a kind."""
    ids = nemesis.cluster.nodes_of(what)
    nodes = nemesis.cluster.nodes
    return next(i for i, node in enumerate(nodes) if i and node.node_id in ids)
