// A block of code: its language, a button that copies it, and colors for strings, comments and words.

const HASHED = new Set(
  "bash dockerfile make makefile perl py python r rb ruby sh shell toml yaml yml zsh".split(" "),
); // languages whose comments start with #
const PLAIN = new Set(["", "text", "txt", "plain", "plaintext", "markdown", "md", "output", "console"]);
const WORDS = new Set((
  "and as async await bool break case catch char class const continue def default del do double elif else " +
  "enum except export extends false False final finally float fn for from func function global go if impl " +
  "import in int interface is lambda let long match mod mut namespace new nil None not null or package pass " +
  "private protected pub public raise return self static str string struct super switch this throw trait " +
  "true True try type typeof undefined union use using var void where while with yield " +
  "create delete group insert into join limit order select set table update values"
).split(" "));
const TOKENS = {
  hash: /(#.*)|("""[^]*?"""|'''[^]*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|\b(\d[\w.]*)|([A-Za-z_]\w*)/g,
  sql: /(--.*)|("(?:[^"\n])*"|'(?:[^'\n])*')|\b(\d[\w.]*)|([A-Za-z_]\w*)/g,
  slash: /([/]{2}.*|[/]\*[^]*?\*[/])|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`)|\b(\d[\w.]*)|([A-Za-z_$][\w$]*)/g,
};

// Colors are for code that is complete: they cost a node each.
export function codeBlock(text, language, complete) {
  const name = language.toLowerCase();
  const box = document.createElement("div");
  box.className = "code";
  const head = document.createElement("div");
  head.className = "code-head";
  const label = document.createElement("span");
  label.textContent = language || "code";
  head.append(label, copyButton(() => text));
  const pre = document.createElement("pre");
  const code = document.createElement("code");
  if (complete && !PLAIN.has(name)) paint(code, text, name);
  else code.textContent = text;
  pre.append(code);
  pre.tabIndex = 0; // a keyboard scrolls it
  box.append(head, pre);
  return box;
}

export function copyButton(content) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const done = await copy(content());
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// The clipboard of a page without TLS, on another host than this, is behind the old command only.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

function paint(code, text, name) {
  const tokens = TOKENS[HASHED.has(name) ? "hash" : name === "sql" ? "sql" : "slash"];
  const data = name === "json";
  let at = 0;
  for (const found of text.matchAll(tokens)) {
    const [whole, comment, string, number, word] = found;
    const known = word && WORDS.has(name === "sql" ? word.toLowerCase() : word);
    const kind = comment ? "comment" : string ? "string" : number ? "number" : known ? "word" : "";
    if (!kind || (data && comment)) continue;
    const mark = document.createElement("span");
    mark.className = `code-${kind}`;
    mark.textContent = whole;
    code.append(text.slice(at, found.index), mark);
    at = found.index + whole.length;
  }
  code.append(text.slice(at));
}
