// What the engine does, drawn from one /ui/state after the other.
import { bars, cells, color, line } from "/ui/draw.js";

const KEPT = 120; // points of a line
const EVENTS = 50;

export class Live {
  constructor(at) {
    this.at = at;
    this.model = ""; // the name of the model shown
    this.chosen = null; // name of the engine shown
    this.before = new Map(); // engine name -> its state before
    this.latency = new Map(); // model -> its times before
    this.tabbed = ""; // names of the engines that have a button
    this.lines = { rate: [], ttft: [], itl: [], step: [] };
  }

  // Shows one of the models, and tells the events of all.
  show(model, models) {
    const all = models.flatMap((own) => own.engines);
    for (const engine of all) this.tell(engine, all.length > 1);
    const engines = model.engines;
    if (model.model !== this.model) {
      this.model = model.model;
      this.blank();
    }
    if (engines.length && !engines.some((own) => own.name === this.chosen)) this.choose(engines[0].name);
    this.tabs(engines);
    const engine = engines.find((own) => own.name === this.chosen);
    if (engine) { // else what it did last stays in sight
      this.measure(engine, model.latency, this.latency.get(model.model));
      this.batch(engine);
      this.pages(engine);
      this.requests(engine);
    }
    for (const own of all) this.before.set(own.name, { ...own, when: performance.now() });
    for (const own of models) this.latency.set(own.model, own.latency);
  }

  choose(name) {
    this.chosen = name;
    for (const points of Object.values(this.lines)) points.length = 0;
  }

  // Nothing of the model before is left, should this one have no engine.
  blank() {
    this.choose(null);
    for (const name of Object.keys(this.lines)) {
      this.at(name).textContent = "–";
      line(this.at(`${name}-line`), []);
    }
    for (const id of ["batch-text", "pages-text", "requests-text"]) this.at(id).textContent = "no engine";
    this.at("requests").tBodies[0].replaceChildren();
    bars(this.at("batch"), 0, 0);
    cells(this.at("pages"), [], []);
  }

  // Buttons stay as long as the engines do: one that is replaced under a finger is not clicked.
  tabs(engines) {
    const names = engines.length < 2 ? [] : engines.map((own) => own.name);
    if (names.join() !== this.tabbed) {
      this.tabbed = names.join();
      this.at("engines").replaceChildren(...names.map((name, index) => {
        const button = document.createElement("button");
        button.textContent = `engine ${index + 1}`;
        button.dataset.name = name;
        button.addEventListener("click", () => this.choose(name));
        return button;
      }));
    }
    for (const button of this.at("engines").children) {
      button.setAttribute("aria-current", button.dataset.name === this.chosen);
    }
  }

  measure(engine, latency, earlier) {
    const before = this.before.get(engine.name);
    if (before) {
      const seconds = (performance.now() - before.when) / 1000;
      const made = engine.totals.generation_tokens - before.totals.generation_tokens;
      this.point("rate", made / seconds, (value) => value.toFixed(0));
      for (const name of ["ttft", "itl"]) {
        const [sum, count] = latency[name].map((own, i) => own - earlier[name][i]);
        this.point(name, count > 0 ? (1000 * sum) / count : null, (value) => `${value.toFixed(1)} ms`);
      }
    }
    const busy = engine.num_running > 0;
    this.point("step", busy ? 1000 * engine.step.seconds : null, (value) => `${value.toFixed(1)} ms`);
  }

  point(name, value, format) {
    const points = this.lines[name];
    points.push(value);
    if (points.length > KEPT) points.shift();
    const known = points.filter((own) => own !== null);
    if (known.length) this.at(name).textContent = format(value ?? known.at(-1));
    line(this.at(`${name}-line`), points);
  }

  batch(engine) {
    const { decode, prefill_rows: rows, prefill_tokens: tokens } = engine.step;
    this.at("batch-text").textContent =
      `${decode} decoding, ${rows} prefilling with ${tokens} tokens`;
    bars(this.at("batch"), decode, tokens);
  }

  pages(engine) {
    const { total, map, page_size: size } = engine.pages;
    const counts = { "-1": 0, "-2": 0, "-3": 0 };
    for (const [owner, count] of map) counts[owner] = (counts[owner] ?? 0) + count;
    const held = total - counts["-1"] - counts["-2"];
    this.at("pages-text").textContent =
      `${total} of ${size} tokens: ${held} held (${counts["-3"]} shared), ${counts["-2"]} kept`;
    cells(this.at("pages"), map, engine.running);
  }

  requests(engine) {
    this.at("requests-text").textContent =
      `${engine.num_running} running, ${engine.num_waiting} waiting`;
    const rows = [
      ...engine.running.map((own) => [own, own.phase, own.cached, own.output, own.pages]),
      ...engine.waiting.map((own) => [own, `waits ${own.seconds.toFixed(1)} s`, "", "", ""]),
    ].map(([own, phase, cached, output, pages]) => {
      const row = document.createElement("tr");
      const mark = document.createElement("i");
      mark.style.background = own.phase ? color(own.id) : "transparent";
      const cell = document.createElement("td");
      cell.append(mark);
      row.append(cell, ...[`#${own.id}`, phase, own.prompt, cached, output, pages].map((value) => {
        const field = document.createElement("td");
        field.textContent = value;
        return field;
      }));
      return row;
    });
    this.at("requests").tBodies[0].replaceChildren(...rows);
  }

  // The newest batches; the part is there once there is one.
  batches(batches) {
    this.at("batches-part").hidden = !batches.length;
    const open = batches.filter((own) => ["validating", "in_progress", "finalizing", "cancelling"].includes(own.status));
    this.at("batches-text").textContent = open.length ? `${open.length} open` : "";
    this.at("batches").tBodies[0].replaceChildren(...batches.map((own) => {
      const row = document.createElement("tr");
      const { completed, failed, total } = own.request_counts;
      const end = new Date(1000 * own.expires_at).toLocaleString();
      row.append(...[own.id.slice(-8), own.status, completed, failed, total, end].map((value) => {
        const field = document.createElement("td");
        field.textContent = value;
        return field;
      }));
      return row;
    }));
  }

  // Events are what changed since the state before.
  tell(engine, named) {
    const before = this.before.get(engine.name);
    if (!before) return;
    const where = named ? `${engine.name.slice(-6)}: ` : "";
    const grown = (name) => engine.totals[name] - before.totals[name];
    if (engine.epoch !== before.epoch) this.event(`${where}runners replaced, epoch ${engine.epoch}`, "bad");
    if (grown("requeued") > 0) this.event(`${where}${grown("requeued")} requests replayed from their tokens`);
    if (grown("pages_read") > 0) this.event(`${where}${grown("pages_read")} pages read from elsewhere`);
    if (grown("moved") > 0) this.event(`${where}${grown("moved")} requests moved to another engine`);
    if (grown("preemptions") > 0) this.event(`${where}${grown("preemptions")} requests preempted for pages`);
    for (const [reason, count] of Object.entries(engine.totals.finished)) {
      const more = count - (before.totals.finished[reason] ?? 0);
      if (more > 0 && reason === "error") this.event(`${where}${more} requests failed`, "bad");
      if (more > 0 && reason === "abort") this.event(`${where}${more} requests aborted`);
    }
  }

  event(text, kind = "") {
    const item = document.createElement("li");
    item.className = kind;
    const time = document.createElement("time");
    time.textContent = new Date().toLocaleTimeString();
    item.append(time, text);
    const list = this.at("events");
    list.prepend(item);
    while (list.children.length > EVENTS) list.lastChild.remove();
  }
}
