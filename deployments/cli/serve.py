"""``rayfin serve``."""

import click
from click.core import ParameterSource

from rayfin.actors.config import EngineArgs
from rayfin.deployments.cli.options import SectionedCommand, build, field_options
from rayfin.deployments.serve.server_args import ServerArgs


@click.command(cls=SectionedCommand)
@click.argument("model_name", metavar="[MODEL]", required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0: every interface")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--name", default="rayfin", show_default=True, help="of the application in Ray Serve")
@click.option(
    "--model-config",
    metavar="FILE",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="one of several models: its own settings in YAML, over the flags; may be repeated",
)
@click.option("--verbose", is_flag=True, help="show the logs of Ray and of the actors")
@field_options(ServerArgs)
@field_options(EngineArgs)
def serve(
    model_name: str | None,
    host: str,
    port: int,
    name: str,
    model_config: tuple[str, ...],
    verbose: bool,
    **settings: object,
) -> int:
    """Serve a model behind the OpenAI API.

    MODEL is a local folder, a Hugging Face name, or "demo", the toy model that comes along.
    Without a Ray cluster, a local one starts; Ctrl-C stops everything.

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
        raise click.UsageError("a model is named on the command line or by --model-config")
    server, engine = build(ServerArgs), build(EngineArgs, **model)

    from rayfin.deployments.serve import serving
    from rayfin.deployments.serve.model_args import read_models

    more = {"models": read_models(server, engine, model_config)} if model_config else {}
    return serving.serve(server, engine, host=host, port=port, name=name, verbose=verbose, **more)
