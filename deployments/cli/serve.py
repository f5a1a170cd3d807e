"""``rayfin serve``."""

import os
from contextlib import ExitStack, nullcontext
from typing import Any

import click
from click.core import ParameterSource

from rayfin.actors.config import EngineArgs
from rayfin.deployments.cli.options import build, field_options
from rayfin.deployments.cli.vllm_options import VllmCommand, aliases_of
from rayfin.deployments.edge.forks import server_forks
from rayfin.deployments.edge.listen_options import ListenOptions
from rayfin.deployments.serve.server_args import ServerArgs


@click.command(cls=VllmCommand)
@click.argument("model_name", metavar="[MODEL]", required=False)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="host to listen on; 0.0.0.0 is every interface",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="port to listen on",
)
@click.option(
    "--name", default="rayfin", show_default=True, help="name of the Ray Serve application"
)
@click.option(
    "--model-config",
    metavar="FILE",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="YAML file with the settings of one model, over the flags; repeat it to serve several",
)
@click.option(
    "--config",
    metavar="FILE",
    expose_value=False,
    type=click.Path(exists=True, dir_okay=False),
    help="YAML file with flags by name, Rayfin's or vLLM's; the command line wins",
)
@click.option(
    "--hf-token",
    metavar="TOKEN",
    is_flag=False,
    flag_value="",  # vLLM's: the token that `hf auth login` has stored
    envvar="HF_TOKEN",
    show_envvar=True,
    help="token of Hugging Face, for its private models; nodes of a running cluster have their own",
)
@click.option(
    "--verbose",
    is_flag=True,
    help="show the logs of Ray and of the actors",
)
@field_options(ListenOptions)
@field_options(ServerArgs, None, **aliases_of(ServerArgs))
@field_options(EngineArgs, None, **aliases_of(EngineArgs))
def serve(
    model_name: str | None,
    host: str,
    port: int,
    name: str,
    model_config: tuple[str, ...],
    hf_token: str | None,
    verbose: bool,
    **settings: object,
) -> int:
    """Serve a model behind an OpenAI-compatible API.

    MODEL is a local folder, a Hugging Face name, or "demo", the built-in toy model. Starts a local
    Ray cluster unless RAY_ADDRESS names one. Ctrl-C stops everything. Flags of `vllm serve` work:
    as other names of Rayfin's, without effect, or refused with what is missing (docs/from-vllm.md).

    \b
    Example:
      rayfin serve Qwen/Qwen3-0.6B --max-model-len 8192
      rayfin serve --model-config small.yaml --model-config large.yaml
    """
    model = {} if model_name is None else {"model": model_name}
    flagged = click.get_current_context().get_parameter_source("model")
    if model and flagged is not ParameterSource.DEFAULT and settings["model"] != model_name:
        raise click.UsageError(f"MODEL is {model_name} and --model is {settings['model']}")
    if model_config and (model or flagged is not ParameterSource.DEFAULT):
        raise click.UsageError("MODEL and --model cannot be combined with --model-config")
    if hf_token:
        os.environ["HF_TOKEN"] = hf_token  # the processes that read the model inherit it
    server, engine, listen_options = (
        build(ServerArgs),
        build(EngineArgs, **model),
        build(ListenOptions),
    )

    from rayfin.deployments.serve import ports

    ports.require_ports(server, host, port, listen_options)  # the rest takes seconds to import

    more: dict[str, Any] = {}
    more |= {"host": host, "port": port, "listen_options": listen_options}
    more |= {"name": name, "verbose": verbose}
    with ExitStack() as held:
        if "RAY_ADDRESS" not in os.environ:  # which imports while this process does
            more["forks"] = server_forks(listen_options)
            held.enter_context(more["forks"] or nullcontext())
        from rayfin.deployments.serve import serving
        from rayfin.deployments.serve.model_args import read_models

        if model_config:
            more["models"] = read_models(server, engine, model_config)
        return serving.serve(server, engine, **more)
