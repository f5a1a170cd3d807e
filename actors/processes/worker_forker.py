"""A program that has imported what Ray's workers import, and forks them.

    python worker_forker.py SOCKET MODULE,MODULE,...

Most of a worker's start is imports, two seconds of Ray and Ray Serve; a fork has them. A raylet
starts ``forked_worker.py`` in place of its workers (``worker_forks.py``):

    raylet ──► forked_worker.py ── arguments, environment, output ──►  worker_forker.py
                    ends         ◄──────── process id ────────────       fork: the worker

One thread does all, so that a fork finds no lock held by another. No module that it imports may
start a thread, or use a GPU. Nor may one draw a random id of Ray's: forks would draw the same ones
again. It looks whether they do, and then forks none. A worker that is not forked starts as ever.
"""

import gc
import importlib
import marshal
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = ("RAY_", "OMP_NUM_THREADS", "SPT_NOENV")
"""Variables that a raylet gives each worker anew. One with others of its own is not forked."""

ANY_JOB = "ffffffff"
"""The job of a worker that a raylet starts before it has one for it."""

STREAMS = 3
"""Standard input, output and error output."""


@dataclass(frozen=True, slots=True)
class Order:
    """A worker to be."""

    words: list[str]  # its program and the arguments
    environment: dict[str, str]
    folder: str
    memory_rank: str  # its oom_score_adj, which the raylet has set
    files: tuple[int, int]  # most of them open: the soft and the hard limit
    streams: list[int]


def preload(names: Sequence[str]) -> None:
    """Imports Ray and modules; a worker imports for itself one that cannot be imported here."""
    import ray.actor
    from ray import ActorClassID

    class DrawnByTheSystem(ActorClassID):
        """Ids of the actor classes that a module defines."""

        @classmethod
        def from_random(cls) -> Any:
            return ActorClassID(os.urandom(ActorClassID.size()))

    actors: Any = ray.actor
    actors.ActorClassID = DrawnByTheSystem
    # Where pandas is installed Ray Serve imports it, for what no deployment of Rayfin's returns,
    # and it starts threads. Serve does without where it is not installed.
    modules: dict[str, Any] = sys.modules
    modules["pandas"] = None
    try:
        import_each(names)
    finally:
        del modules["pandas"]
        actors.ActorClassID = ActorClassID


def import_each(names: Sequence[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"{name} is not imported ahead: {error!r}", file=sys.stderr, flush=True)


def forks_differ() -> bool:
    """Whether two forks draw different random ids of Ray's."""
    from ray import ObjectID

    drawn = set()
    for _ in range(2):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, ObjectID.from_random().binary())
            os._exit(0)
        os.close(writer)
        drawn.add(os.read(reader, 1 << 10))
        os.close(reader)
    return len(drawn) == 2


def is_alone() -> bool:
    """Whether this process has one thread: a fork lacks others, and may wait for their locks."""
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len(threads) > 1:
        print(f"no worker is forked: threads run: {threads}", file=sys.stderr, flush=True)
    return len(threads) == 1


def listen(path: str) -> socket.socket:
    """A socket that takes orders from now on: they wait until they are read."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    return listener


def serve(listener: socket.socket, environment: dict[str, str], *, forks: bool) -> Order | None:
    """Forks workers until the end of standard input.

    Args:
        environment: that of a worker that is forked, but for what a raylet gives each anew.
        forks: whether it does; else it sends them away.

    Returns:
        In a worker, what it is to be; else None.
    """
    while True:
        ready = select.select([listener, sys.stdin], [], [])[0]
        if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1 << 10):
            return None
        if listener in ready:
            order = answer(listener.accept()[0], environment if forks else {})
            if order is not None:
                listener.close()
                return order


def answer(caller: socket.socket, environment: dict[str, str]) -> Order | None:
    """Reads an order and forks. Returns it in the child, None in this process."""
    with caller:
        try:
            order = read_order(caller, environment)
        except (OSError, EOFError, ValueError, TypeError) as error:
            print(f"a worker's order cannot be read: {error!r}", file=sys.stderr, flush=True)
            return None
        child = 0
        try:
            # One that has waited for long is a worker by now.
            if order is not None and is_waiting(caller) and (child := os.fork()) == 0:
                return order
            caller.sendall(struct.pack("=i", child))
        except OSError as error:
            print(f"a worker is not forked: {error}", file=sys.stderr, flush=True)
        if order is not None:
            close(order.streams)
    return None


def read_order(caller: socket.socket, environment: dict[str, str]) -> Order | None:
    """The caller's order, None if it is not to be carried out.

    Raises:
        OSError, EOFError, ValueError, TypeError: the caller is gone, or is no worker.
    """
    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("=iii", credentials)[1] != os.getuid():
        raise ValueError("of another user")
    data, streams, _, _ = socket.recv_fds(caller, 1 << 16, STREAMS)
    try:
        while len(data) < 4 or len(data) < 4 + struct.unpack_from("=I", data)[0]:
            if not (more := caller.recv(1 << 16)):
                raise EOFError
            data += more
        words, variables, folder, rank, files = marshal.loads(data[4:])
        if len(streams) == STREAMS and is_plain(variables, environment):
            return Order(words, variables, folder, rank, files, streams)
    except BaseException:
        close(streams)
        raise
    close(streams)
    return None


def close(streams: Sequence[int]) -> None:
    for stream in streams:
        os.close(stream)


def is_plain(variables: dict[str, str], environment: dict[str, str]) -> bool:
    """Whether a worker's environment is ``environment``, which the imports have read."""
    differing = {name for name, _ in variables.items() ^ environment.items()}
    return all(name.startswith(OWN) for name in differing)


def is_waiting(caller: socket.socket) -> bool:
    try:
        return caller.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True


def become(order: Order) -> None:
    """Makes this process, which was forked, what a raylet would have started."""
    for number, stream in enumerate(order.streams):
        os.dup2(stream, number)
    close(order.streams)
    os.setpgid(0, 0)  # a raylet ends a worker's group with it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray starts its own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(order.environment)
    reread_environment()
    os.chdir(order.folder)
    try:
        Path("/proc/self/oom_score_adj").write_text(order.memory_rank)
    except OSError as error:
        print(f"oom_score_adj stays: {error}", file=sys.stderr, flush=True)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, order.files)
    except (OSError, ValueError) as error:
        print(f"the number of open files stays: {error}", file=sys.stderr, flush=True)
    if "numpy.random" in sys.modules:  # Python's own generator is seeded by fork
        sys.modules["numpy.random"].seed()
    sys.argv = order.words
    sys.path.insert(0, str(Path(order.words[0]).parent))


def reread_environment() -> None:
    """Has Ray read again how its processes know each other, which is decided when it starts."""
    from ray import _raylet

    core: Any = _raylet
    core.Config.initialize("")


def main(path: str, names: Sequence[str]) -> Order | None:
    """Serves; returns in a worker what it is to be, else None at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the whole group
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    sys.path.pop(0)  # this folder: its modules are no top-level ones
    listener = listen(path)
    # Ray reads these when it is imported, and no more. A worker looks whether that process lives.
    os.environ |= {"RAY_JOB_ID": ANY_JOB, "RAY_RAYLET_PID": str(os.getppid())}
    environment = dict(os.environ)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # or it starts threads when it is imported
    preload(names)
    if "OPENBLAS_NUM_THREADS" not in environment:
        del os.environ["OPENBLAS_NUM_THREADS"]
    gc.collect()
    gc.freeze()  # the collector of a fork would copy each page that it looks at
    try:
        reread_environment()
        forks = forks_differ() and is_alone()
    except Exception as error:  # another Ray
        print(f"no worker is forked: {error!r}", file=sys.stderr, flush=True)
        forks = False
    return serve(listener, environment, forks=forks)


if __name__ == "__main__":
    if (ordered := main(sys.argv[1], sys.argv[2].split(","))) is not None:
        become(ordered)
        runpy.run_path(sys.argv[0], run_name="__main__")
