// Puts the page together: the key, the model, the chat on the left, the engine on the right.
import { Chat } from "/ui/chat.js";
import { Live } from "/ui/live.js";
import { Settings } from "/ui/settings.js";

const POLL_MS = 500;
const at = (id) => document.getElementById(id);

let key = sessionStorage.getItem("rayfin-key") || "";
const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  sessionStorage.setItem("rayfin-key", key);
});

const live = new Live(at);
const chat = new Chat(at, headers, new Settings(at));

// On a narrow screen one of the two is shown.
for (const button of at("views").children) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const own of at("views").children) own.setAttribute("aria-pressed", own === button);
    if (shown) show(shown); // what was drawn while hidden had no width
  });
}

function say(text, kind) {
  const badge = at("health");
  badge.textContent = text;
  badge.className = `badge ${kind}`;
}

// The model that is talked to and shown: the first one, until another is chosen.
function chosen(models) {
  const choice = at("models");
  const names = models.map((own) => own.model);
  if ([...choice.options].map((own) => own.value).join("\n") !== names.join("\n")) {
    const before = choice.value;
    choice.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(before)) choice.value = before;
  }
  choice.hidden = names.length < 2;
  return models.find((own) => own.model === choice.value);
}

function show(state) {
  const model = chosen(state.models);
  at("model").textContent = at("models").hidden ? model.model : "";
  at("model").title = `Rayfin ${state.version}`;
  chat.use(model.model);
  live.show(model, state.models);
  live.batches(state.batches);
  say(model.engines.length ? "serving" : "no engine", model.engines.length ? "good" : "bad");
}

let shown = null; // the last state
at("models").addEventListener("change", () => show(shown));

async function poll() {
  try {
    const answer = await fetch("/ui/state", { headers: headers(), signal: AbortSignal.timeout(4000) });
    at("key-form").hidden = answer.status !== 401;
    if (answer.ok) {
      shown = await answer.json();
      show(shown);
    } else {
      say(answer.status === 401 ? "needs a key" : `error ${answer.status}`, "bad");
    }
  } catch {
    say("not reachable", "bad");
  }
  setTimeout(poll, POLL_MS);
}

poll();
