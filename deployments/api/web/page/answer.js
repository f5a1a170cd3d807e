// One answer of the model: what it thought, folded; its text; its tool calls, as calls.
import { copyButton } from "/ui/code.js";
import { Markdown, element } from "/ui/markdown.js";

// What a call might return, to start from: the page runs no tool.
const EXAMPLES = { get_weather: '{"temperature": 21, "condition": "sunny"}' };

export class Answer {
  // `answered(call, result)` is called when a person has typed what a call returned.
  constructor(turn, answered) {
    this.turn = turn;
    this.answered = answered;
    this.message = { role: "assistant", content: "" };
    this.cards = []; // of each call: {field, result}
    this.thought = null;
    this.text = null;
    this.drawing = 0; // the frame that will draw the text so far
  }

  // Adds the delta of one event; returns whether it had anything to show.
  add(delta) {
    if (delta.reasoning) this.think(delta.reasoning);
    if (delta.content) this.write(delta.content);
    for (const piece of delta.tool_calls ?? []) this.call(piece);
    return Boolean(delta.reasoning || delta.content || delta.tool_calls);
  }

  // Shows all there is, and says how the answer went.
  finish(note) {
    this.draw();
    this.turn.classList.remove("open");
    for (const [index, { field, result }] of this.cards.entries()) {
      const call = inner(this.message.tool_calls[index]);
      const given = parsed(call.arguments);
      if (given) field.textContent = JSON.stringify(given, null, 1).replaceAll("\n ", "\n  ");
      const example = EXAMPLES[call.name];
      if (example && !result.value) result.value = example;
    }
    const foot = element("small", "foot", element("span", "", note));
    if (this.message.content) foot.append(copyButton(() => this.message.content));
    this.turn.append(foot);
    return foot;
  }

  part(name, kind) {
    const part = element(name, kind);
    this.turn.append(part);
    return part;
  }

  think(text) {
    if (!this.thought) {
      const folded = this.part("details", "thought");
      this.thought = element("div");
      folded.append(element("summary", "", "Reasoning"), this.thought);
    }
    this.message.reasoning = (this.message.reasoning ?? "") + text;
    this.thought.append(text);
  }

  write(text) {
    this.text ??= new Markdown(this.part("div", "text"));
    this.message.content += text;
    this.drawing ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.drawing);
    this.drawing = 0;
    this.text?.show(this.message.content);
    this.turn.dispatchEvent(new Event("drawn"));
  }

  // A piece of a call: of a function with arguments, or of a custom tool with a text.
  call({ index, id, type, function: part, custom }) {
    this.message.tool_calls ??= [];
    const calls = this.message.tool_calls;
    const { name, arguments: piece, input } = part ?? custom;
    if (id) {
      calls[index] = type === "custom"
        ? { id, type, custom: { name, input: "" } }
        : { id, type: "function", function: { name, arguments: "" } };
      this.cards[index] = this.card(calls[index]);
    }
    const said = inner(calls[index]);
    said[custom ? "input" : "arguments"] += piece ?? input;
    this.cards[index].field.textContent = said.arguments ?? said.input;
  }

  // Shows a call with a field for its result.
  card(call) {
    const field = element("code");
    const result = element("input");
    result.placeholder = "What the call returns";
    result.setAttribute("aria-label", `Result of ${inner(call).name}`);
    const send = Object.assign(element("button", "", "Return"), { type: "button" });
    const done = () => {
      if (!result.value || result.disabled) return;
      result.disabled = send.disabled = true;
      this.answered(call, result.value);
    };
    result.addEventListener("keydown", (event) => {
      if (event.key === "Enter") { event.preventDefault(); done(); }
    });
    send.addEventListener("click", done);
    const head = element("div", "call-head", "Calls ", element("b", "", inner(call).name));
    this.part("div", "call").append(head, field, element("div", "row", result, send));
    return { field, result };
  }
}

// What a call says, whatever its type.
function inner(call) {
  return call.function ?? call.custom;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // an answer that was cut
  }
}
