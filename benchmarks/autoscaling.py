"""Autoscaling on a local Ray cluster: one engine, two under load, and one again.

    python benchmarks/autoscaling.py [--users 24] [--staying 2] [--idle-timeout 10]

Some users stay while an engine stops. Answers are greedy, and a repeated question must get the same
answer. The exit status is 1 if an answer differs, a request fails, or the engines do not follow.
"""

import argparse
import itertools
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

import httpx
import ray
from ray import serve
from server import free_ports

from rayfin.actors.config import EngineArgs
from rayfin.deployments.app import bind_app
from rayfin.deployments.client.engine_names import find_engines
from rayfin.deployments.serve.server_args import ServerArgs

APP = "autoscaling"
PATIENCE = 240.0  # seconds for a change of the number of engines
LOOK_SECONDS = 0.5
PAGES_MEMORY = 2 * 1024**2  # bytes: the users' answers fill it
OUTPUT_TOKENS = 200
QUESTIONS = 4  # of each user, repeated


@dataclass(slots=True)
class Users:
    """Users that each ask, read the whole answer and ask again until they leave."""

    url: str
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _answers: dict[str, list[int]] = field(default_factory=dict)  # by question
    _users: list[tuple[threading.Event, threading.Thread]] = field(default_factory=list)

    def start(self, count: int) -> None:
        for number in range(count):
            leave = threading.Event()
            thread = threading.Thread(target=self._run_user, args=(number, leave))
            self._users.append((leave, thread))
            thread.start()

    def leave(self, staying: int = 0) -> None:
        """Stops all but ``staying`` users and waits for their answers."""
        leaving, self._users = self._users[staying:], self._users[:staying]
        for leave, _ in leaving:
            leave.set()
        for _, thread in leaving:
            thread.join()

    def _run_user(self, number: int, leave: threading.Event) -> None:
        with httpx.Client(base_url=self.url, timeout=PATIENCE) as http:
            for turn in itertools.cycle(range(QUESTIONS)):
                if leave.is_set():
                    return
                self._ask(http, f"User {number}, question {turn}: What is the capital of")

    def _ask(self, http: httpx.Client, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        try:
            reply = http.post("/v1/completions", json=body)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        tokens = reply.json()["choices"][0]["token_ids"]
        if len(tokens) != OUTPUT_TOKENS or self._answers.setdefault(prompt, tokens) != tokens:
            self.failures.append(f"{prompt!r}: the answer differs from before")
        self.answered += 1


class EngineLog:
    """Prints the number of engines whenever it changes."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self._began = time.monotonic()
        self._last = -1

    def until(self, wanted: int) -> None:
        """Waits for this number of engines.

        Raises:
            TimeoutError: it is not reached.
        """
        deadline = time.monotonic() + PATIENCE
        while self._last != wanted:
            engines = len(find_engines(APP))
            if engines != self._last:
                self._last = engines
                self.log(f"{engines} engine{'' if engines == 1 else 's'}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"never reached {wanted} engines")
            time.sleep(LOOK_SECONDS)

    def log(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        users = self._users
        counts = f"answered {users.answered}, failed {len(users.failures)}"
        print(f"{seconds:7.1f} s  {text:20}  {counts}", flush=True)


def follow(users: Users, timeline: EngineLog, count: int, staying: int) -> None:
    timeline.until(1)
    users.start(count)
    timeline.log(f"{count} users start")
    try:
        timeline.until(2)
        time.sleep(10 * LOOK_SECONDS)
        users.leave(staying)
        timeline.log(f"{staying} users stay")
        timeline.until(1)
        time.sleep(10 * LOOK_SECONDS)
    finally:
        users.leave()
    timeline.log("all users left")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--staying", type=int, default=2)
    parser.add_argument("--idle-timeout", type=float, default=10.0)
    options = parser.parse_args()
    (port,) = free_ports(1)
    users = Users(f"http://127.0.0.1:{port}")
    with tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            _temp_dir=folder,
            include_dashboard=False,
            num_cpus=4,
            log_to_driver=False,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            server = ServerArgs(min_engines=1, max_engines=2, idle_timeout=options.idle_timeout)
            engine = EngineArgs(threads=1, max_model_len=512, kv_cache_memory=PAGES_MEMORY)
            serve.run(bind_app(server, engine), name=APP)
            follow(users, EngineLog(users), options.users, options.staying)
        finally:
            ray.shutdown()
    for failure in users.failures[:5]:
        print(failure)
    return 1 if users.failures else 0


if __name__ == "__main__":
    sys.exit(main())
