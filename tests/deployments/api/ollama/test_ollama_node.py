"""The ollama package of npm, call by call, over a socket."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent_programs import SECONDS, NpmUnreachable, call, installed
from fake_server import listening
from pooling_models import add_modules, make_decoder
from pooling_server import make_service
from rayfin.deployments.api.app import build_api
from scripted_agent import scripted_service

PACKAGE = "ollama@0.6.4"
CALLS = """\
import { Ollama } from 'ollama';

const client = new Ollama({ host: process.argv[2] });
const model = 'scripted';
const messages = [{ role: 'user', content: 'What is the weather in Rome?' }];
const city = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
const tools = [{ type: 'function', function: { name: 'weather', parameters: city } }];
const said = {};

async function gathered(stream, textOf) {
  let text = '', last;
  for await (const part of stream) { text += textOf(part); last = part; }
  return [text, last.done, last.eval_count > 0, last.done_reason];
}

said.chat = (await client.chat({ model, messages, options: { num_predict: 0 } })).message;
said.stream = await gathered(
  await client.chat({ model, messages, stream: true }), (part) => part.message.content);
const asked = (await client.chat({ model, messages, tools })).message;
said.call = asked.tool_calls[0].function;
messages.push(asked, { role: 'tool', content: 'sunny', tool_name: 'weather' });
said.result = (await client.chat({ model, messages, tools })).message.content;
said.generate = (await client.generate({ model, prompt: 'hello', keep_alive: '5m' })).response;
said.generated = await gathered(
  await client.generate({ model, prompt: 'hello', stream: true }), (part) => part.response);
said.embed = (await client.embed({ model: 'vectors', input: ['a', 'b'] })).embeddings
  .map((vector) => vector.length);
said.show = (await client.show({ model })).capabilities;
said.ps = (await client.ps()).models.map((each) => each.name);
said.list = (await client.list()).models.map((each) => each.name);
said.version = (await client.version()).version;
said.error = await client.chat({ model: 'other', messages }).catch((error) => error.message);
console.log(JSON.stringify(said));
"""
FINE = {"role": "assistant", "content": "Fine."}

pytestmark = pytest.mark.thorough(reason="installs a package; the Python one is in make test")


def test_every_call(tmp_path: Path) -> None:
    try:
        installed(tmp_path, PACKAGE)
    except NpmUnreachable as reason:
        pytest.skip(str(reason))
    (tmp_path / "calls.mjs").write_text(CALLS)
    service, _ = scripted_service([call("weather", city="Rome"), "It is sunny."], "weather")
    folder = make_decoder(tmp_path / "model")
    add_modules(folder, {"pooling_mode_lasttoken": True})
    vectors = make_service(folder, "vectors")
    vectors = replace(vectors, load=service.load, answers=service.answers)
    with listening(build_api(service, vectors)) as url:
        done = subprocess.run(
            ["node", "calls.mjs", url],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["chat"] == FINE and said["generate"] == "Fine."
    assert said["stream"] == said["generated"] == ["Fine.", True, True, "stop"]
    assert said["call"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert said["result"] == "It is sunny."
    assert said["embed"][0] == said["embed"][1] > 0
    assert "tools" in said["show"] and said["version"][0].isdigit()
    assert said["list"] == said["ps"] == [*service.model_names, "vectors"]
    assert "does not exist" in said["error"]
