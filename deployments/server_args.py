"""What a server may be told beside its engine's settings."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """The doors' settings: one field per flag."""

    served_model_name: str | None = _flag(None, "the name clients use; default: the model's")
    api_key: str | None = _flag(None, "clients must send it as a bearer token")
    chat_template: str | None = _flag(None, "a Jinja template, or a file that holds one")
    generation_config: Literal["auto", "vllm"] = _flag(
        "auto", "auto: the model's sampling defaults; vllm: ignore them"
    )
    shutdown_timeout: float = _flag(30.0, "seconds that running requests get to finish at a stop")
    ingress_replicas: int = _flag(1, "HTTP replicas that tokenize and stream")

    def __post_init__(self) -> None:
        if self.generation_config not in ("auto", "vllm"):
            raise InvalidConfig(
                f"generation_config must be 'auto' or 'vllm', got {self.generation_config!r}",
                "generation_config",
            )
        if self.ingress_replicas < 1:
            raise InvalidConfig(
                f"ingress_replicas must be at least 1, got {self.ingress_replicas}",
                "ingress_replicas",
            )
        if self.shutdown_timeout < 0:
            raise InvalidConfig(
                f"shutdown_timeout must not be negative, got {self.shutdown_timeout}",
                "shutdown_timeout",
            )
        if self.chat_template is not None and "{" not in self.chat_template:
            if not Path(self.chat_template).is_file():
                raise InvalidConfig(f"there is no file {self.chat_template}", "chat_template")


class _AppArgs(BaseModel):
    """The typed arguments of ``build_app``: the fields of ServerArgs and of EngineArgs."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def _fields_of(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: (hints[f.name], f.default) for f in fields(kind)}


AppArgs: type[_AppArgs] = create_model(
    "AppArgs", __base__=_AppArgs, **_fields_of(ServerArgs), **_fields_of(EngineArgs)
)


def split_args(values: dict[str, Any]) -> tuple[ServerArgs, EngineArgs]:
    """Flat settings, taken apart.

    Raises:
        InvalidConfig: a name or value that is none.
    """
    own = {f.name for f in fields(ServerArgs)}
    server = ServerArgs(**{name: value for name, value in values.items() if name in own})
    return server, EngineArgs.from_dict({n: v for n, v in values.items() if n not in own})
