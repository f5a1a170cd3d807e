"""Every exception that Rayfin raises on purpose, in one tree.

    RayfinError                        500  internal_error
    ├── InvalidRequest                 400  invalid_value            the caller's mistake
    │   ├── InvalidLine                400  invalid_line             a line of a batch
    │   ├── ContextLengthExceeded      400  context_length_exceeded
    │   ├── TemplateTooSlow            400  template_too_slow
    │   ├── TemplateTooLong            400  template_too_long
    │   ├── NotPermitted               403  permission_denied        not for this tenant
    │   ├── ModelNotFound              404  model_not_found
    │   ├── ModelNotSupported          404  model_not_supported      it has other routes
    │   └── NotFound                   404  not_found                any other named object
    ├── Overloaded                     429  queue_full
    │   └── RateLimited                429  rate_limit_exceeded      the tenant's quota is used up
    ├── MediaUnavailable               502  media_unavailable        an image's server has failed
    ├── DeadlineExceeded               408  deadline_exceeded        the request's time limit passed
    ├── RequestFailed                  500  engine_error             this request alone failed
    │   ├── NumericalError             500  numerical_error          its logits were not finite
    │   ├── NoTokenLeft                400  no_token_left            its own rules leave no token
    │   │   ├── GrammarFailed          400  grammar_failed           so does its grammar
    │   │   └── GrammarTooSlow         400  grammar_too_slow         its grammar held up a step
    │   ├── AdapterUnavailable         503  adapter_unavailable      its adapter is gone
    │   └── RequestQuarantined         500  request_quarantined      it killed its runners
    ├── EngineBusy                     409  conflict                 an update of weights is amid
    ├── StorageFull                    507  storage_full             the disk of --batch-dir
    ├── EngineUnavailable              503  engine_unavailable       starting, draining or dead
    │   ├── EngineAsleep               503  engine_asleep            until an operator wakes it
    │   ├── EnginePaused               503  engine_paused            until its new weights are there
    │   ├── EngineLost                  -   the connection to an engine broke
    │   ├── RequestHandedBack           -   an engine that drains returns the request
    │   └── NotOwner                    -   another supervisor has claimed the engine
    ├── InvalidConfig                   -   a flag or a model that cannot be served
    │   ├── UnsupportedModel            -   an architecture that Rayfin does not serve
    │   └── NoRoomNow                   -   a request that fits no memory which is free now
    ├── RunnerGroupFailed               -   the runners are gone or broken
    │   └── CallLost                    -   a call to a runner, or its answer, was lost
    ├── Fenced                          -   the runners belong to a later scheduler
    ├── StepMissing                     -   the step before this one was lost
    ├── PeerLost                        -   a rank waits for another one that does not answer
    └── ServerError                     -   of a client command: the server failed

    outside of it, because no caller may take them for an error of a request:
    UnrecognizedModule (Exception)      a module that no fast implementation fits
    BrokenFile (Exception)              a file of arrays that is not as it was written
    ClientGone (Exception)              the HTTP client has left
    PageCorrupted (RuntimeError)        a page has changed in memory
    InjectedFault (RuntimeError)        a failpoint's ``raise``

The columns are the HTTP status and the ``code`` of the body; "-" stands for errors that are handled
before there is an answer. An error crosses actors by pickle, so each one keeps its arguments in
``args``.
"""

import re
from collections.abc import Mapping
from typing import Any

RAISED = re.compile(r"rayfin\.actors\.errors\.(\w+): (.+)")
"""One of these in a traceback: its class and its message."""


class RayfinError(Exception):
    """Base class; ``status`` is the HTTP status, ``type`` and ``code`` belong to closed sets."""

    status = 500
    type = "internal_error"
    code = "internal_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


# Requests that are refused.


class InvalidRequest(RayfinError):
    """The caller's mistake. ``param`` is the field's dotted path as the caller wrote it."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param)
        self.args = (message, param, code)
        if code is not None:
            self.code = code

    details: Mapping[str, Any] | None = None
    """Details of an error for programs, which an API's clients expect in the body."""


class InvalidLine(InvalidRequest):
    """A line of a batch is no request; it may have a ``custom_id`` all the same."""

    custom_id: str | None = None


class ContextLengthExceeded(InvalidRequest):
    """The prompt is longer than the context, or needs more pages than the engine has."""

    code = "context_length_exceeded"
    tokens: tuple[int, int] | None = None  # of the prompt, at least, and at most allowed

    def sized(self, tokens: int, limit: int) -> "ContextLengthExceeded":
        """Returns itself, with numbers for clients that read them."""
        self.tokens = (tokens, limit)
        return self


class TemplateTooSlow(InvalidRequest):
    """The chat template has used up its processor time."""

    code = "template_too_slow"


class TemplateTooLong(InvalidRequest):
    """The chat template has rendered too much text."""

    code = "template_too_long"


class NotPermitted(InvalidRequest):
    """The tenant may not use what the request asks for."""

    status = 403
    code = "permission_denied"


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served."""

    status = 404
    code = "model_not_found"


class ModelNotSupported(InvalidRequest):
    """The model is served, but not at this route: it generates, or it embeds, or it scores."""

    status = 404
    code = "model_not_supported"


class NotFound(InvalidRequest):
    """The request names an object that does not exist, or that belongs to another tenant."""

    status = 404
    code = "not_found"


class Overloaded(RayfinError):
    """The queue is full. The client may retry after ``retry_after`` seconds, or None if unknown."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(
        self, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message, param)
        self.args = (message, param, retry_after)
        self.retry_after = retry_after


class RateLimited(Overloaded):
    """The tenant has used up its quota; ``headers`` state limit, rest and reset."""

    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        param: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, param, retry_after)
        self.args = (message, param, retry_after, headers)
        self.headers = headers or {}


# Requests that fail.


class MediaUnavailable(RayfinError):
    """The server of an image that a request names has failed."""

    status = 502
    type = "server_error"
    code = "media_unavailable"


class DeadlineExceeded(RayfinError):
    """The request's own time limit passed before it finished."""

    status = 408
    type = "timeout_error"
    code = "deadline_exceeded"


class RequestFailed(RayfinError):
    """One request failed inside the engine; all others continue."""

    type = "server_error"
    code = "engine_error"


class NumericalError(RequestFailed):
    """The model's logits for this request were not finite, so no token can be sampled."""

    code = "numerical_error"


class NoTokenLeft(RequestFailed):
    """The request's own rules leave no token where it stands. The same request fails again."""

    status = 400
    type = "invalid_request_error"
    code = "no_token_left"


class GrammarFailed(NoTokenLeft):
    """The request's grammar does not compile, met a limit, or allows no token where it stands."""

    code = "grammar_failed"


class AdapterUnavailable(RequestFailed):
    """The content of the request's adapter cannot be had any more."""

    status = 503
    code = "adapter_unavailable"


class GrammarTooSlow(NoTokenLeft):
    """To find the tokens that the request's grammar allows took too long for a step."""

    code = "grammar_too_slow"


class RequestQuarantined(RequestFailed):
    """The request killed its runners more than once, or has the prompt of one that did."""

    code = "request_quarantined"


class StorageFull(RayfinError):
    """There is no room on the disk for a file or a batch."""

    status = 507
    type = "server_error"
    code = "storage_full"


# Engines that cannot take a request.


class EngineUnavailable(RayfinError):
    """No engine can take the request now."""

    status = 503
    type = "server_error"
    code = "engine_unavailable"


class EngineAsleep(EngineUnavailable):
    """Every engine sleeps; requests are accepted again when an operator wakes one."""

    code = "engine_asleep"


class EnginePaused(EngineUnavailable):
    """The engine is paused, and takes no new requests until it is resumed."""

    code = "engine_paused"


class EngineBusy(RayfinError):
    """An update of weights is in another state than the call wants."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class EngineLost(EngineUnavailable):
    """The connection to an engine broke; ``crashed`` if the engine has died."""

    def __init__(self, message: str, param: str | None = None, crashed: bool = False) -> None:
        super().__init__(message, param)
        self.args = (message, param, crashed)
        self.crashed = crashed


class RequestHandedBack(EngineUnavailable):
    """A draining engine returns the request unfinished.

    No HTTP client sees this: the sender submits the request to another engine, with the tokens
    received so far.
    """

    code = "moved"


class NotOwner(EngineUnavailable):
    """A supervisor's pulse reached an engine that another supervisor has claimed."""

    code = "not_owner"


# Start.


class InvalidConfig(RayfinError):
    """A flag or a model folder that cannot be served. Raised at start, never by a request."""

    code = "invalid_config"


class UnsupportedModel(InvalidConfig):
    """The architecture does not fit a paged decoder (encoder-decoder, state space)."""

    code = "unsupported_model"


class NoRoomNow(InvalidConfig):
    """The longest request does not fit into the memory that was free when it was measured.

    Another engine that loads, or one that ends, may have held the rest: a later start may succeed.
    """


# Between a scheduler and its runners.


class RunnerGroupFailed(RayfinError):
    """The runners are gone or broken; their requests must be recomputed on new ones.

    ``caused_by_step``: a runner reported that a step raised, so one of its requests is to blame.
    """

    code = "runner_failed"

    def __init__(
        self, message: str, param: str | None = None, caused_by_step: bool = False
    ) -> None:
        super().__init__(message, param)
        self.args = (message, param, caused_by_step)
        self.caused_by_step = caused_by_step


class CallLost(RunnerGroupFailed):
    """A call or its answer was lost on its way; the runner may be alive."""


class Fenced(RayfinError):
    """The runners belong to a later scheduler, so this one has been replaced and must stop."""

    code = "fenced"


class StepMissing(RayfinError):
    """A step arrived before its predecessor, which was lost on its way."""

    code = "runner_failed"


class PeerLost(RayfinError):
    """A rank waited too long for another one of its group, which has died or hangs."""

    code = "runner_failed"


# Client commands.


class ServerError(RayfinError):
    """The server could not be reached, refused the request, or broke the stream off."""


# Outside of the tree.


class UnrecognizedModule(Exception):
    """A module does not have the form that can be fused; the message names it."""


class BrokenFile(Exception):
    """A file is not as it was written; the message says why."""


class ClientGone(Exception):
    """The client closed its connection before the answer."""


class PageCorrupted(RuntimeError):
    """A page's bits differ from those that were computed: memory or a kernel is at fault."""


class InjectedFault(RuntimeError):
    """A failpoint's ``raise``. It is no RayfinError, as an exception from a bug would be none."""
