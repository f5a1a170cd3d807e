"""Every error that Rayfin raises on purpose.

    RayfinError                        500  internal_error
    ├── InvalidRequest                 400  invalid_request_error   the caller's mistake
    │   ├── ContextLengthExceeded      400  context_length_exceeded
    │   ├── ModelNotFound              404  model_not_found
    │   ├── NotPermitted               403  permission_denied       not to this tenant
    │   └── NotFound                   404  not_found               anything else that is named
    ├── InvalidConfig                   -   a flag or a model that cannot be served
    │   └── UnsupportedModel            -   an architecture outside what Rayfin serves
    ├── RequestFailed                  500  engine_error            this request alone failed
    │   ├── NumericalError             500  numerical_error         its logits were not finite
    │   └── RequestQuarantined         500  request_quarantined     it killed its runners
    ├── Overloaded                     429  queue_full
    │   └── RateLimited                429  rate_limit_exceeded     the tenant's tokens are used up
    ├── DeadlineExceeded               408  deadline_exceeded       its time ran out
    └── EngineUnavailable              503  engine_unavailable      starting, draining or dead
        ├── EngineAsleep               503  engine_asleep           until an operator wakes it
        └── RequestHandedBack          503  moved                   to be sent again, no death

An error crosses actors by pickle, so each one keeps its arguments in ``args``.
"""


class RayfinError(Exception):
    """Base of all; ``status`` is the HTTP status, ``code`` comes from a closed set of words."""

    status = 500
    type = "internal_error"
    code = "internal_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


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


class ContextLengthExceeded(InvalidRequest):
    """The prompt cannot fit: longer than the context, or needs more pages than exist."""

    code = "context_length_exceeded"


class NotPermitted(InvalidRequest):
    """The request asks for what its tenant may not have."""

    status = 403
    code = "permission_denied"


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class NotFound(InvalidRequest):
    """The request names something that is not there, or is not this caller's to see."""

    status = 404
    code = "not_found"


class InvalidConfig(RayfinError):
    """A flag, or a model folder, that cannot be served. Raised at start, never by a request."""

    code = "invalid_config"


class UnsupportedModel(InvalidConfig):
    """The architecture is not one that a paged decoder can serve (encoder-decoder, state space)."""

    code = "unsupported_model"


class RequestFailed(RayfinError):
    """One request failed inside the engine; the others went on."""

    type = "server_error"
    code = "engine_error"


class NumericalError(RequestFailed):
    """The model's logits for this request were not finite: there is no token to sample."""

    code = "numerical_error"


class RequestQuarantined(RequestFailed):
    """The request killed its runners more than once, or has the prompt of one that did."""

    code = "request_quarantined"


class Overloaded(RayfinError):
    """The queue is full; the client may retry after so many seconds, None if nobody knows."""

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
    """The caller has used up what it may; ``headers`` tell how much that is."""

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


class DeadlineExceeded(RayfinError):
    """The request's own time limit passed before it was done."""

    status = 408
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineUnavailable(RayfinError):
    """No engine can take the request now."""

    status = 503
    type = "server_error"
    code = "engine_unavailable"


class EngineAsleep(EngineUnavailable):
    """Every engine has been put to sleep, and takes requests again when an operator wakes it."""

    code = "engine_asleep"


class RequestHandedBack(EngineUnavailable):
    """The engine hands the request back unfinished (it drains): another one may go on with it.

    No client sees it: whoever sent the request sends it again, with the tokens told so far.
    """

    code = "moved"


class RunnerGroupFailed(RayfinError):
    """The runners are gone or broken; what ran on them must be recomputed on new ones.

    ``caused_by_step``: a runner said that a step did it; nobody else can have.
    """

    code = "runner_failed"

    def __init__(
        self, message: str, param: str | None = None, caused_by_step: bool = False
    ) -> None:
        super().__init__(message, param)
        self.args = (message, param, caused_by_step)
        self.caused_by_step = caused_by_step


class Fenced(RayfinError):
    """The runners belong to a later scheduler: this one was taken for dead, and must not go on."""

    code = "fenced"


class StepMissing(RayfinError):
    """A step has come before the one that it follows, which was lost on its way."""

    code = "runner_failed"


class PeerLost(RayfinError):
    """A runner waits in vain for another one of its group: somebody has died, or is stuck."""

    code = "runner_failed"


class UnrecognizedModule(Exception):
    """A module is not of the form that can be fused; the message names it."""


class PageCorrupted(RuntimeError):
    """A page's bits are not those that were computed: memory, or a kernel, is at fault."""


class InjectedFault(RuntimeError):
    """What ``raise`` raises: no error of Rayfin's, as a bug would not be one."""


class NotOwner(EngineUnavailable):
    """A supervisor's pulse at an engine that another one has claimed meanwhile."""

    code = "not_owner"


class CallLost(RunnerGroupFailed):
    """A call or its answer was lost on its way; the runner may well live."""


class EngineLost(EngineUnavailable):
    """The connection to an engine broke; ``crashed`` if the engine has died."""

    def __init__(self, message: str, param: str | None = None, crashed: bool = False) -> None:
        super().__init__(message, param)
        self.args = (message, param, crashed)
        self.crashed = crashed


class ClientGone(Exception):
    """The client closed its connection before the answer."""


class TemplateTooSlow(InvalidRequest):
    """The template has used up its time."""

    code = "template_too_slow"


class TemplateTooLong(InvalidRequest):
    """The template has written too much."""

    code = "template_too_long"


class PeerFailed(RayfinError):
    """A peer died, or answered something else than was asked for."""


class ServerError(RayfinError):
    """The server could not be reached, or refused, or broke off."""
