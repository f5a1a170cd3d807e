"""What a raylet starts as a worker: it has ``worker_forker.py`` fork one, or becomes one itself.

    python -I -S forked_worker.py SOCKET SECONDS default_worker.py ARGUMENTS

It imports next to nothing, for it is started for each worker. It waits for an answer so many
seconds: at first ``worker_forker.py`` imports.
"""

import marshal
import os
import resource
import socket
import struct
import sys


def ask(path: str, seconds: float, words: list[str]) -> bool:
    """Whether a worker has been forked."""
    with open("/proc/self/oom_score_adj") as file:
        rank = file.read()
    # Ray raises the number of open files once the forker has started.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    order = marshal.dumps((words, dict(os.environ), os.getcwd(), rank, files))
    with socket.socket(socket.AF_UNIX) as forker:
        forker.settimeout(seconds)
        forker.connect(path)
        credentials = forker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("=iii", credentials)[1] != os.getuid():
            return False
        data = struct.pack("=I", len(order)) + order
        sent = socket.send_fds(forker, [data], [0, 1, 2])
        forker.sendall(data[sent:])
        answer = forker.recv(4)
    return len(answer) == 4 and struct.unpack("=i", answer)[0] > 0


if __name__ == "__main__":
    try:
        forked = ask(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
    except (OSError, ValueError):  # the forker is gone, or hangs
        forked = False
    if not forked:
        os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
