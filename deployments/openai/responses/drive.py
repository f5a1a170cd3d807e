"""From a generation to the state of a response."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from rayfin.actors.errors import RequestFailed
from rayfin.deployments.openai.generation import Deltas
from rayfin.deployments.openai.logprobs import LogprobsWriter
from rayfin.deployments.openai.responses.state import ResponseState


async def drive(
    state: ResponseState,
    deltas: Deltas,
    ended: Callable[[ResponseState], Awaitable[None]],
    writer: LogprobsWriter | None = None,
) -> AsyncGenerator[None, None]:
    """Runs the generation to its end and keeps ``state`` up to date; yields at each change.

    Closing it early aborts the generation and cancels the response. A failure is written down, then
    raised. ``ended`` is awaited at the end, whichever it is. With a ``writer``, log probabilities
    are told too.
    """
    try:
        async with aclosing(deltas):
            async for choice, delta in deltas:
                told = writer.chat(delta.token_ids, delta.logprobs).content if writer else []
                state.take(delta.text, len(choice.token_ids), choice.cached_tokens, told)
                if delta.finish_reason == "abort":
                    raise RequestFailed("The engine aborted this response.")
                if delta.finish_reason is not None:
                    length = delta.finish_reason == "length"
                    state.finish("incomplete" if length else "completed")
                    await ended(state)  # before anybody is told
                yield
    except Exception as error:
        state.fail(error)
        raise
    finally:
        state.finish("cancelled")
        await ended(state)
