"""A program: a Ray of two nodes with made-up GPUs, each with a cache of its own for buckets.

    python two_nodes.py FOLDER PORT SETTINGS

It prints what it saw as one line of JSON.
"""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.util import list_named_actors, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import rayfin
from object_store import ObjectStore, serving
from rayfin.actors.buckets.folder import CACHE, bucket_folder
from rayfin.actors.processes.registry import NAMESPACE
from rayfin.deployments.serve.preflight import DEMO_FOLDER
from rayfin.llm import build_openai_app

LABEL = "accelerator_type:L4"
NODES = ("a", "b")
URI = "s3://bucket/demo"
PROMPT, LENGTH = "What is 37 + 48?", 16


def on(node: str) -> Any:
    return NodeAffinitySchedulingStrategy(node, soft=False)


@ray.remote(num_cpus=0)
def read() -> dict[str, str]:
    folder = bucket_folder(URI)
    return {path.name: digest(path) for path in folder.iterdir()}


@ray.remote(num_cpus=0)
def ask() -> list[int]:
    async def work() -> list[int]:
        async with await rayfin.connect("two", model="demo") as client:
            params = rayfin.SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
            outputs = [output async for output in client.generate(PROMPT, params)]
            return list(outputs[-1].outputs[0].token_ids)

    return asyncio.run(work())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def until(probe: Callable[[], Any]) -> Any:
    end = time.monotonic() + 120
    while not (found := probe()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def readers() -> list[Any]:
    named = list_named_actors(all_namespaces=True)
    names = [own["name"] for own in named if own["name"].startswith("bucket/")]
    return [ray.get_actor(name, NAMESPACE) for name in names]


def read_buckets(store: ObjectStore, nodes: list[str], folder: Path) -> dict[str, Any]:
    """Has both nodes read at once, then again, then again while the reader is killed."""

    def on_both() -> Any:
        return [read.options(scheduling_strategy=on(node)).remote() for node in nodes]

    expected = {path.name: digest(path) for path in DEMO_FOLDER.iterdir()}
    right = [found == expected for found in ray.get(on_both())]
    once = dict(store.sent)
    right += [found == expected for found in ray.get(on_both())]
    again = dict(store.sent)
    for name in NODES:
        shutil.rmtree(folder / name)
    store.hold.set()
    reading = on_both()
    until(store.holding.is_set)
    (reader,) = readers()
    os.kill(ray.get(reader.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    store.hold.clear()
    right += [found == expected for found in ray.get(reading)]
    left = [str(path) for path in folder.rglob("*.part")]
    return {"right": right, "once": once, "again": again, "left": left}


def serve_a_model(nodes: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Serves two stages that have to be apart, and asks from the node that has neither."""
    config = {
        "model_loading_config": {"model_id": "demo"},
        "accelerator_type": "L4",
        "engine_kwargs": {**settings, "device": "cpu", "pipeline_parallel_size": 2},
        "placement_group_config": {
            "bundle_per_worker": {"CPU": 1, "GPU": 1},
            "strategy": "STRICT_SPREAD",
        },
    }
    serve.run(build_openai_app({"llm_configs": [config]}), name="two", route_prefix="/")
    (group,) = [own for own in placement_group_table().values() if own["state"] == "CREATED"]
    head = ray.get_runtime_context().get_node_id()
    return {
        "bundles": list(group["bundles"].values()),
        "nodes": sorted(nodes.index(node) for node in group["bundles_to_node_id"].values()),
        "strategy": group["strategy"],
        "tokens": ray.get(ask.options(scheduling_strategy=on(head)).remote()),
    }


def main() -> None:
    folder, port, settings = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    shutil.copytree(DEMO_FOLDER, folder / "store" / "demo")
    store = ObjectStore(folder / "store")
    with serving(store) as url:
        os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_REGION": "here"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        memory = 96 * 2**20
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": memory},
        )
        try:
            for name in NODES:
                cluster.add_node(
                    **{"num_cpus": 1, "num_gpus": 1, "resources": {LABEL: 1}},
                    env_vars={CACHE: str(folder / name)},
                    object_store_memory=memory,
                )
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
            nodes = [node["NodeID"] for node in ray.nodes() if LABEL in node["Resources"]]
            buckets = read_buckets(store, nodes, folder)
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            print(json.dumps({"buckets": buckets, "model": serve_a_model(nodes, settings)}))
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
