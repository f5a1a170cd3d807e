// One answer of the model: what it thought, folded; its text; its tool calls, as calls.

export class Answer {
  // `answered(call, result)` is called when a person has typed what a call returned.
  constructor(turn, answered) {
    this.turn = turn;
    this.answered = answered;
    this.message = { role: "assistant", content: "" };
    this.fields = []; // of each call: where its arguments are shown
    this.thought = null;
    this.text = null;
  }

  // Adds the delta of one event; returns whether it had anything to show.
  add(delta) {
    if (delta.reasoning) this.think(delta.reasoning);
    if (delta.content) this.write(delta.content);
    for (const piece of delta.tool_calls ?? []) this.call(piece);
    const shown = Boolean(delta.reasoning || delta.content || delta.tool_calls);
    if (shown) this.turn.scrollIntoView({ block: "end" });
    return shown;
  }

  part(name, kind) {
    const part = document.createElement(name);
    part.className = kind;
    this.turn.append(part);
    return part;
  }

  think(text) {
    if (!this.thought) {
      const folded = this.part("details", "thought");
      folded.append(Object.assign(document.createElement("summary"), { textContent: "Reasoning" }));
      this.thought = document.createElement("div");
      folded.append(this.thought);
    }
    this.message.reasoning = (this.message.reasoning ?? "") + text;
    this.thought.textContent = this.message.reasoning;
  }

  write(text) {
    this.text ??= this.part("span", "text");
    this.message.content += text;
    this.text.textContent = this.message.content;
  }

  call({ index, id, function: { name, arguments: piece } }) {
    this.message.tool_calls ??= [];
    const calls = this.message.tool_calls;
    if (id) {
      calls[index] = { id, type: "function", function: { name, arguments: "" } };
      this.fields[index] = this.card(calls[index]);
    }
    calls[index].function.arguments += piece;
    this.fields[index].textContent = calls[index].function.arguments;
  }

  // Shows a call with a field for its result.
  card(call) {
    const card = this.part("div", "call");
    const name = Object.assign(document.createElement("b"), { textContent: call.function.name });
    const field = document.createElement("code");
    const result = document.createElement("input");
    result.placeholder = "Result, then Enter";
    result.setAttribute("aria-label", `Result of ${call.function.name}`);
    result.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !result.value) return;
      event.preventDefault();
      result.disabled = true;
      this.answered(call, result.value);
    });
    card.append(name, field, result);
    return field;
  }
}
