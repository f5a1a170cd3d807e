// A conversation over /v1/chat/completions, streamed.

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
    const messages = this.messages;
    messages.push({ role: "user", content: text });
    this.bubble("user", text);
    const turn = this.bubble("assistant", "");
    this.aborter = new AbortController();
    this.busy(true);
    const answer = { role: "assistant", content: "" };
    try {
      await this.stream(messages, answer, turn);
    } catch (error) {
      if (error.name !== "AbortError") this.bubble("error", error.message);
    }
    messages.push(answer);
    this.aborter = null;
    this.busy(false);
  }

  async stream(messages, answer, turn) {
    const started = performance.now();
    let first = null;
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      signal: this.aborter.signal,
      headers: { "Content-Type": "application/json", ...this.headers() },
      body: JSON.stringify({
        model: this.model,
        messages,
        stream: true,
        stream_options: { include_usage: true },
        temperature: Number(this.at("temperature").value),
        max_completion_tokens: Number(this.at("max-tokens").value) || undefined,
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices[0]?.delta?.content;
      if (piece) {
        first ??= performance.now();
        answer.content += piece;
        turn.textContent = answer.content;
        turn.scrollIntoView({ block: "end" });
      }
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
