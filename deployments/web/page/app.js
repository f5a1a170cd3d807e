// Puts the page together: the key, the chat on the left, the engine on the right.
import { Chat } from "/ui/chat.js";
import { Live } from "/ui/live.js";

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
const chat = new Chat(at, headers);

function say(text, kind) {
  const badge = at("health");
  badge.textContent = text;
  badge.className = `badge ${kind}`;
}

async function poll() {
  try {
    const answer = await fetch("/ui/state", { headers: headers(), signal: AbortSignal.timeout(4000) });
    at("key-form").hidden = answer.status !== 401;
    if (answer.ok) {
      const state = await answer.json();
      at("model").textContent = `${state.model} · ${state.version}`;
      chat.model = state.model;
      live.show(state);
      say(state.engines.length ? "serving" : "no engine", state.engines.length ? "good" : "bad");
    } else {
      say(answer.status === 401 ? "needs a key" : `error ${answer.status}`, "bad");
    }
  } catch {
    say("not reachable", "bad");
  }
  setTimeout(poll, POLL_MS);
}

poll();
