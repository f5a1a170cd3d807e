"""Prints the files that one plain chat runs through, in one process: the HTTP API, engine, model.

    python tools/trace_chat.py

The chat is the second one, so that what is imported or made once does not count.
`tests/test_trace_chat.py` holds the count, and that no feature's room is among them.
"""

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType

import httpx

from rayfin.actors.config import EngineArgs
from rayfin.deployments.offline.async_engines import InlineModel
from rayfin.deployments.offline.async_llm import AsyncLLM
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.server_args import ServerArgs

ROOT = Path(__file__).resolve().parents[1]
FEATURES = (
    "actors/adapters/",
    "actors/guidance.py",
    "actors/media/",
    "actors/model_files/pooling_",
    "actors/runner/parts/",
    "actors/runner/speculation/",
    "deployments/adapters/",
    "deployments/guidance/",
    "deployments/media/",
    "deployments/pooling/",
)
"""Rooms and files of features, which a plain chat does not enter."""

BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 37 + 48?"}],
    "temperature": 0,
    "max_tokens": 12,
    "stream": True,
}


class Tracer:
    """Notes the files whose functions are called in any thread, while it is ``on``."""

    def __init__(self) -> None:
        self.on = False
        self.code_files: set[str] = set()

    def start(self) -> None:
        """Threads that begin from now on are followed too."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def files(self) -> list[str]:
        """The package's files among them, by their paths in the repository."""
        paths = (Path(name).resolve() for name in self.code_files)
        ours = (path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT))
        folders = {"actors", "cache", "deployments", "kernels"}
        return sorted(path.as_posix() for path in ours if path.parts[0] in folders)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if self.on and event == "call":
            self.code_files.add(frame.f_code.co_filename)


def trace_chat(model: str = "demo") -> list[str]:
    """Returns the files of the package that a streamed chat enters."""
    tracer = Tracer()
    tracer.start()
    try:
        asyncio.run(_chat_twice(model, tracer))
    finally:
        tracer.stop()
    return tracer.files()


async def _chat_twice(model: str, tracer: Tracer) -> None:
    arguments = ModelArgs(ServerArgs(served_model_name="demo"), EngineArgs(model=model))
    async with AsyncLLM(InlineModel(arguments)) as llm:
        transport = httpx.ASGITransport(await llm.asgi_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://chat") as client:
            for tracer.on in (False, True):
                answer = await client.post("/v1/chat/completions", json=BODY, timeout=600)
                assert answer.status_code == 200 and "[DONE]" in answer.text, answer.text
        tracer.on = False


def main() -> None:
    files = trace_chat()
    print("\n".join(files))
    entered = [name for name in files if name.startswith(FEATURES)]
    print(f"{len(files)} files, {len(entered)} of features: {', '.join(entered)}")


if __name__ == "__main__":
    main()
