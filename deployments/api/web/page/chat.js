// A conversation over /v1/chat/completions, streamed, with tools if the page has some.
import { Answer } from "/ui/answer.js";

const WEATHER = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the current weather for a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}]; // the demo model has learned to call it

export class Chat {
  constructor(at, headers) {
    this.at = at;
    this.headers = headers;
    this.model = "";
    this.messages = [];
    this.aborter = null;
    at("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    at("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); this.send(); }
    });
    at("stop").addEventListener("click", () => this.aborter?.abort());
    at("weather").addEventListener("click", () => { at("tools").value = JSON.stringify(WEATHER, null, 1); });
    at("clear").addEventListener("click", () => this.clear());
  }

  clear() {
    this.aborter?.abort();
    this.messages = [];
    this.at("log").replaceChildren();
  }

  bubble(kind, text) {
    const turn = document.createElement("div");
    turn.className = `turn ${kind}`;
    turn.textContent = text;
    this.at("log").append(turn);
    turn.scrollIntoView({ block: "end" });
    return turn;
  }

  busy(is) {
    this.at("send").hidden = is;
    this.at("stop").hidden = !is;
  }

  async send() {
    const text = this.at("prompt").value.trim();
    if (!text || this.aborter) return;
    this.at("prompt").value = "";
    this.messages.push({ role: "user", content: text });
    this.bubble("user", text);
    await this.reply();
  }

  // Streams the model's next message.
  async reply() {
    const messages = this.messages;
    const turn = this.bubble("assistant", "");
    const answer = new Answer(turn, (call, result) => this.answered(messages, call, result));
    this.aborter = new AbortController();
    this.busy(true);
    try {
      await this.stream(messages, answer, turn);
    } catch (error) {
      if (error.name !== "AbortError") this.bubble("error", error.message);
    }
    messages.push(answer.message);
    this.aborter = null;
    this.busy(false);
  }

  // Sends the results of the last message's calls once all of them are there.
  async answered(messages, call, result) {
    if (messages !== this.messages) return; // of a conversation that was cleared
    messages.push({ role: "tool", tool_call_id: call.id, content: result });
    const known = new Set(messages.map((own) => own.tool_call_id));
    const last = messages.findLast((own) => own.tool_calls);
    if (!this.aborter && last.tool_calls.every((own) => known.has(own.id))) await this.reply();
  }

  async stream(messages, answer, turn) {
    const started = performance.now();
    let first = null;
    const tools = this.at("tools").value.trim();
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      signal: this.aborter.signal,
      headers: { "Content-Type": "application/json", ...this.headers() },
      body: JSON.stringify({
        model: this.model,
        messages,
        tools: tools ? JSON.parse(tools) : undefined,
        stream: true,
        stream_options: { include_usage: true },
        temperature: Number(this.at("temperature").value),
        max_completion_tokens: Number(this.at("max-tokens").value) || undefined,
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      if (answer.add(event.choices[0]?.delta ?? {})) first ??= performance.now();
      if (event.usage && first) this.note(turn, event.usage, started, first);
    }
  }

  note(turn, usage, started, first) {
    const note = document.createElement("small");
    const rate = (usage.completion_tokens - 1) / ((performance.now() - first) / 1000);
    const speed = usage.completion_tokens > 1 ? ` · ${rate.toFixed(0)} tokens/s` : "";
    note.textContent = `${usage.completion_tokens} tokens · first after ${(first - started).toFixed(0)} ms${speed}`;
    turn.append(note);
  }
}

// The JSON values of a stream of server-sent events, up to [DONE].
async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((own) => own.startsWith("data: "));
      if (!line || line === "data: [DONE]") continue;
      yield JSON.parse(line.slice(6));
    }
  }
}
