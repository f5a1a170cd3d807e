// The drawer: what is sent with each request beside the messages. It lasts as long as the tab.

export const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the current weather for a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}; // the demo model has learned to call it

const NUMBERS = { temperature: "temperature", "top-p": "top_p", "max-tokens": "max_completion_tokens", seed: "seed" };
const LABELS = { temperature: "temperature", "top-p": "top p", "max-tokens": "tokens ≤", seed: "seed" };
const FIELDS = [...Object.keys(NUMBERS), "system", "tools"];
const STORED = "rayfin-settings";

export class Settings {
  constructor(at) {
    this.at = at;
    const stored = JSON.parse(sessionStorage.getItem(STORED) || "{}");
    for (const id of FIELDS) {
      at(id).value = stored[id] ?? "";
      at(id).addEventListener("input", () => this.changed());
    }
    const dialog = at("settings");
    at("settings-open").addEventListener("click", () => dialog.showModal());
    at("chips").addEventListener("click", () => dialog.showModal());
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    at("weather").addEventListener("click", () => this.addTool(WEATHER));
    at("reset").addEventListener("click", () => this.reset());
    this.changed();
  }

  reset() {
    for (const id of FIELDS) this.at(id).value = "";
    this.changed();
  }

  // The tools, or null while they are no list.
  tools() {
    const text = this.at("tools").value.trim();
    if (!text) return [];
    try {
      const list = JSON.parse(text);
      return Array.isArray(list) ? list : null;
    } catch {
      return null;
    }
  }

  addTool(tool) {
    const known = (this.tools() ?? []).filter((own) => own.function?.name !== tool.function.name);
    this.at("tools").value = JSON.stringify([...known, tool], null, 1);
    this.changed();
  }

  // The fields of a request's body.
  body(messages) {
    const system = this.at("system").value.trim();
    const tools = this.tools();
    if (tools === null) throw new Error("Tools must be a JSON list. Settings show the text.");
    const body = { messages: system ? [{ role: "system", content: system }, ...messages] : messages };
    if (tools.length) body.tools = tools;
    for (const [id, name] of Object.entries(NUMBERS)) {
      if (this.at(id).value !== "") body[name] = Number(this.at(id).value);
    }
    return body;
  }

  changed() {
    const tools = this.tools();
    this.at("tools-error").textContent = tools === null ? "This is no JSON list." : "";
    const told = Object.keys(NUMBERS).filter((id) => this.at(id).value !== "")
      .map((id) => `${LABELS[id]} ${this.at(id).value}`);
    if (this.at("system").value.trim()) told.unshift("system prompt");
    if (tools?.length) told.push(tools.length === 1 ? "1 tool" : `${tools.length} tools`);
    this.at("chips").replaceChildren(...told.map((text) => {
      const chip = document.createElement("button");
      chip.type = "button";
      chip.textContent = text;
      return chip;
    }));
    const values = Object.fromEntries(FIELDS.map((id) => [id, this.at(id).value]));
    sessionStorage.setItem(STORED, JSON.stringify(values));
  }
}
