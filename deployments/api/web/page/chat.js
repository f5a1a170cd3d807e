// A conversation over /v1/chat/completions, streamed, with what the drawer says.
import { Answer } from "/ui/answer.js";
import { examples } from "/ui/examples.js";
import { Pictures, content, split, thumbnail } from "/ui/pictures.js";
import { WEATHER } from "/ui/settings.js";

const NEAR = 60; // pixels from the end within which a reader follows it
const BURST_MS = 50; // a rate of less time than this says nothing

export class Chat {
  constructor(at, headers, settings) {
    this.at = at;
    this.headers = headers;
    this.settings = settings;
    this.model = "";
    this.messages = [];
    this.aborter = null;
    this.welcome = at("welcome");
    this.pictures = new Pictures(at("pictures"), at("pictures-note"), at("chat"), at("prompt"));
    at("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    at("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    at("prompt").addEventListener("input", () => this.grow());
    at("stop").addEventListener("click", () => this.aborter?.abort());
    at("clear").addEventListener("click", () => this.clear());
  }

  use(model) {
    if (model === this.model) return;
    this.model = model;
    this.at("prompt").placeholder = `Message ${model}`;
    const choose = (text, tool) => {
      if (tool) this.settings.addTool(WEATHER);
      this.say(text);
    };
    this.welcome.querySelector("#examples").replaceChildren(...examples(model, choose));
  }

  clear() {
    this.aborter?.abort();
    this.messages = [];
    this.at("log").replaceChildren(this.welcome);
    this.at("prompt").focus();
  }

  // The field is as high as its text, up to a limit of the style's.
  grow() {
    const field = this.at("prompt");
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight}px`;
  }

  bubble(kind, text) {
    const turn = document.createElement("div");
    turn.className = `turn ${kind}`;
    turn.textContent = text;
    this.welcome.remove();
    this.at("log").append(turn);
    this.follow(true);
    return turn;
  }

  // Keeps the end in sight of a reader who is there.
  follow(always = false) {
    const log = this.at("log");
    const rest = log.scrollHeight - log.scrollTop - log.clientHeight;
    if (always || rest < NEAR + log.clientHeight / 4) log.scrollTop = log.scrollHeight;
  }

  busy(is) {
    this.at("send").hidden = is;
    this.at("stop").hidden = !is;
  }

  async send() {
    const text = this.at("prompt").value.trim();
    if (!(text || this.pictures.count) || this.aborter) return;
    this.at("prompt").value = "";
    this.grow();
    await this.say(text, this.pictures.take());
  }

  async say(text, urls = []) {
    if (this.aborter) return;
    this.messages.push({ role: "user", content: content(text, urls) });
    this.bubble("user", text).append(...urls.map(thumbnail));
    await this.reply();
  }

  // Streams the model's next message.
  async reply() {
    const messages = this.messages;
    const turn = this.bubble("assistant open", "");
    turn.addEventListener("drawn", () => this.follow());
    const answer = new Answer(turn, (call, result) => this.answered(messages, call, result));
    this.aborter = new AbortController();
    this.busy(true);
    let note = "";
    try {
      note = await this.stream(messages, answer);
    } catch (error) {
      note = error.name === "AbortError" ? "stopped" : "";
      if (!note && messages === this.messages) this.bubble("error", error.message);
    }
    if (note || turn.hasChildNodes()) {
      this.again(answer.finish(note), messages, turn);
      messages.push(answer.message);
    } else {
      this.takeBack(messages, turn);
    }
    this.aborter = null;
    this.busy(false);
    this.follow();
  }

  // A message that was refused is back in the field, to be sent again.
  takeBack(messages, turn) {
    turn.remove();
    if (messages.at(-1).role !== "user") return;
    const { text, urls } = split(messages.pop().content);
    this.at("prompt").value ||= text;
    this.pictures.put(urls);
    this.grow();
  }

  // A button that asks for the last answer once more.
  again(foot, messages, turn) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "again";
    button.textContent = "Try again";
    button.addEventListener("click", () => {
      if (this.aborter || messages !== this.messages || turn !== this.at("log").lastElementChild) return;
      messages.pop();
      turn.remove();
      this.reply();
    });
    foot.append(button);
  }

  // Sends the results of the last message's calls once all of them are there.
  async answered(messages, call, result) {
    if (messages !== this.messages) return; // of a conversation that was cleared
    messages.push({ role: "tool", tool_call_id: call.id, content: result });
    const known = new Set(messages.map((own) => own.tool_call_id));
    const last = messages.findLast((own) => own.tool_calls);
    if (!this.aborter && last.tool_calls.every((own) => known.has(own.id))) await this.reply();
  }

  // Adds what comes to the answer; returns a line about it.
  async stream(messages, answer) {
    const started = performance.now();
    let [first, usage] = [null, null];
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      signal: this.aborter.signal,
      headers: { "Content-Type": "application/json", ...this.headers() },
      body: JSON.stringify({
        model: this.model,
        ...this.settings.body(messages),
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      if (answer.add(event.choices[0]?.delta ?? {})) first ??= performance.now();
      usage = event.usage ?? usage;
    }
    const count = usage?.completion_tokens ?? 0;
    const parts = [`${count} tokens`];
    if (first) {
      parts.push(`first after ${(first - started).toFixed(0)} ms`);
      const took = performance.now() - first;
      if (count > 1 && took > BURST_MS) parts.push(`${((1000 * (count - 1)) / took).toFixed(0)} tokens/s`);
    }
    return parts.join(" · ");
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
