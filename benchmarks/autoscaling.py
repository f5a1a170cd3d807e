"""Engines that come and go under load, on a local Ray: one, a second for many users, one again.

    python benchmarks/autoscaling.py [--users 24] [--staying 2] [--idle-timeout 10]

Some users stay while an engine is taken away. Answers are greedy, and a question asked again must
be answered as before. The exit status is 1 if one was not, one failed, or no engine followed.
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
PATIENCE = 240.0  # seconds for one change of the number of engines
LOOK_SECONDS = 0.5
PAGES_MEMORY = 2 * 1024**2  # bytes: the users' answers fill it
OUTPUT_TOKENS = 200
QUESTIONS = 4  # of each user, again and again


@dataclass(slots=True)
class Users:
    """Each asks, reads the whole answer and asks again, until it is told to leave."""

    url: str
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    _answers: dict[str, list[int]] = field(default_factory=dict)  # by question
    _users: list[tuple[threading.Event, threading.Thread]] = field(default_factory=list)

    def come(self, count: int) -> None:
        for number in range(count):
            leave = threading.Event()
            thread = threading.Thread(target=self._ask_on, args=(number, leave))
            self._users.append((leave, thread))
            thread.start()

    def leave(self, staying: int = 0) -> None:
        """Returns when all others have their answers."""
        leaving, self._users = self._users[staying:], self._users[:staying]
        for leave, _ in leaving:
            leave.set()
        for _, thread in leaving:
            thread.join()

    def _ask_on(self, number: int, leave: threading.Event) -> None:
        with httpx.Client(base_url=self.url, timeout=PATIENCE) as http:
            for turn in itertools.cycle(range(QUESTIONS)):
                if leave.is_set():
                    return
                self._ask(http, f"User {number}, question {turn}: What is the capital of")

    def _ask(self, http: httpx.Client, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        asked = {**body, "ignore_eos": True, "return_token_ids": True}
        try:
            reply = http.post("/v1/completions", json=asked)
            reply.raise_for_status()
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        tokens = reply.json()["choices"][0]["token_ids"]
        if len(tokens) != OUTPUT_TOKENS or self._answers.setdefault(prompt, tokens) != tokens:
            self.failures.append(f"{prompt!r}: another answer than before")
        self.answered += 1


class Timeline:
    """Prints how many engines there are, whenever that changes."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self._began = time.monotonic()
        self._last = -1

    def until(self, wanted: int) -> None:
        """Returns when there are so many engines.

        Raises:
            TimeoutError: there never were.
        """
        deadline = time.monotonic() + PATIENCE
        while self._last != wanted:
            engines = len(find_engines(APP))
            if engines != self._last:
                self._last = engines
                self.say(f"{engines} engine{'' if engines == 1 else 's'}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"there were never {wanted} engines")
            time.sleep(LOOK_SECONDS)

    def say(self, words: str) -> None:
        seconds = time.monotonic() - self._began
        users = self._users
        counts = f"answered {users.answered}, failed {len(users.failures)}"
        print(f"{seconds:7.1f} s  {words:20}  {counts}", flush=True)


def follow(users: Users, timeline: Timeline, count: int, staying: int) -> None:
    timeline.until(1)
    users.come(count)
    timeline.say(f"{count} users come")
    try:
        timeline.until(2)
        time.sleep(10 * LOOK_SECONDS)
        users.leave(staying)
        timeline.say(f"{staying} users stay")
        timeline.until(1)
        time.sleep(10 * LOOK_SECONDS)
    finally:
        users.leave()
    timeline.say("all have left")


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
            follow(users, Timeline(users), options.users, options.staying)
        finally:
            ray.shutdown()
    for failure in users.failures[:5]:
        print(failure)
    return 1 if users.failures else 0


if __name__ == "__main__":
    sys.exit(main())
