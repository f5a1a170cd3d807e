"""``rayfin agents``: the settings of coding agents and other clients for a running server."""

from string import Template
from urllib.parse import urlsplit

import click

from rayfin.deployments.cli.options import server_options

SETTINGS: dict[str, tuple[str, str]] = {  # client -> language and text; docs/agents.md has them too
    "Claude Code": (
        "sh",
        """\
export ANTHROPIC_BASE_URL=$root
export ANTHROPIC_AUTH_TOKEN=$key
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude --model $model
""",
    ),
    "Codex (~/.codex/config.toml)": (
        "toml",
        """\
model = "$model"
model_provider = "rayfin"
model_context_window = $context
[model_providers.rayfin]
name = "Rayfin"
base_url = "$root/v1"
wire_api = "responses"
$env_key""",
    ),
    "OpenCode (opencode.json)": (
        "json",
        """\
{
  "model": "rayfin/$model",
  "provider": {
    "rayfin": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$root/v1", "apiKey": "$key"},
      "models": {"$model": {"limit": {"context": $context, "output": $output}}}
    }
  }
}
""",
    ),
    "Qwen Code, and most programs with OpenAI's API": (
        "sh",
        """\
export OPENAI_BASE_URL=$root/v1
export OPENAI_API_KEY=$key
export OPENAI_MODEL=$model
""",
    ),
    "aider": (
        "sh",
        """\
aider --model openai/$model --openai-api-base $root/v1 --openai-api-key $key
""",
    ),
    "Programs with Ollama's API": (
        "sh",
        """\
export OLLAMA_HOST=$root
export OLLAMA_API_KEY=$key
""",
    ),
}


def settings(root: str, model: str, context: int, key: str = "none") -> str:
    """Returns all settings, as Markdown.

    Args:
        root: the server's address, without a path.
        context: tokens of the model.
        key: the server's API key.
    """
    values = {"root": root, "model": model, "context": context, "key": key}
    values["output"] = min(8192, context // 4)
    name = "RAYFIN_API_KEY"  # Codex does not start where it is not set
    values["env_key"] = "" if key == "none" else f'env_key = "{name}"  # export {name}={key}\n'
    return "\n".join(
        f"### {client}\n\n```{kind}\n{Template(text).substitute(values)}```\n"
        for client, (kind, text) in SETTINGS.items()
    )


@click.command()
@server_options
def agents(url: str, api_key: str | None, model: str | None) -> None:
    """Print the settings of coding agents for a running server.

    \b
    Example:
      rayfin agents --url http://127.0.0.1:8000/v1
    """
    import httpx

    from rayfin.deployments.bench.endpoint import client_settings, context_length, find_model

    with httpx.Client(**client_settings(url, api_key)) as client:
        name = find_model(client, model)
        length = context_length(client, name) or 32768
        parts = urlsplit(str(client.base_url))
    root = parts._replace(path=parts.path.rstrip("/").removesuffix("/v1")).geturl()
    click.echo(settings(root, name, length, api_key or "none"))
