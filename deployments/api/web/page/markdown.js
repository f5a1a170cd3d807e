// Markdown as DOM nodes. Text of a model never becomes HTML: every node is made here, by name.
import { codeBlock } from "/ui/code.js";

const DEEPEST = 8; // of quotes, lists and emphasis inside each other
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|\s*)$/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const LINK = /^(https?:|mailto:)/i;
const BARE = /https?:[/]{2}[^\s<>"'`*]*[^\s<>"'`*.,;:!?)\]]/iy;
const LETTER = /[\p{L}\p{N}]/u;

export function element(name, kind = "", ...children) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  made.append(...children);
  return made;
}

// A growing text. Blocks that stay the same keep their nodes, so that a selection in them lives.
export class Markdown {
  constructor(root) {
    this.root = root;
    this.sources = [];
  }

  show(text) {
    const parsed = blocks(text.split("\n"), 0);
    let same = 0;
    while (same < parsed.length && parsed[same].source === this.sources[same]) same += 1;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.root.append(...parsed.slice(same).map((own) => own.build()));
    this.sources = parsed.map((own) => own.source);
  }
}

// The blocks of some lines, each with its source and a function that makes its one node.
function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [end, build] = block(lines, at, depth);
    found.push({ source: lines.slice(at, end).join("\n"), build });
    at = end;
  }
  return found;
}

function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [at + 1, () => element(`h${heading[1].length}`, "", inline(heading[2]))];
  if (RULE.test(line)) return [at + 1, () => element("hr")];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (tableStarts(lines, at)) return table(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end, depth)) end += 1;
  return [end, () => element("p", "", inline(lines.slice(at, end).map((own) => own.trim()).join("\n")))];
}

function interrupts(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || tableStarts(lines, at)) return true;
  return depth < DEEPEST && (QUOTE.test(line) || (ITEM.test(line) && ITEM.exec(line)[3] !== undefined));
}

function fenced(lines, at, [, mark, language]) {
  const indent = lines[at].length - lines[at].trimStart().length;
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const closed = end < lines.length;
  const text = lines.slice(at + 1, end).map((own) => own.replace(new RegExp(`^ {0,${indent}}`), "")).join("\n");
  return [closed ? end + 1 : end, () => codeBlock(text, language, closed)];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((own) => own.replace(QUOTE, ""));
  return [end, () => element("blockquote", "", ...blocks(inner, depth + 1).map((own) => own.build()))];
}

// A list: items of one kind, each with the lines indented under it.
function list(lines, at, depth) {
  const [, first, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || item[1].length > first.length + 1 || item[1].length < first.length) break;
    if (/\d/.test(item[2]) !== ordered || RULE.test(lines[end])) break;
    const inner = [item[3] ?? ""];
    const edge = first.length + 1;
    for (end += 1; end < lines.length; end += 1) {
      const indent = lines[end].length - lines[end].trimStart().length;
      if (lines[end].trim() && indent < edge + 1 && (indent < edge || ITEM.test(lines[end]))) break;
      inner.push(lines[end].slice(Math.min(indent, edge + mark.length)));
    }
    items.push(inner);
    while (inner.length > 1 && !inner.at(-1).trim()) inner.pop();
  }
  return [end, () => {
    const made = element(ordered ? "ol" : "ul");
    if (ordered) made.start = parseInt(mark, 10);
    made.append(...items.map((own) => listItem(own, depth)));
    return made;
  }];
}

function listItem(lines, depth) {
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  const body = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  const parts = blocks(body, depth + 1).map((own) => own.build());
  // The one paragraph of a tight item is its text, without a paragraph's space.
  const tight = parts[0]?.nodeName === "P" ? [...parts[0].childNodes, ...parts.slice(1)] : parts;
  const item = element("li", task ? "task" : "", ...tight);
  if (task) {
    const box = Object.assign(element("input"), { type: "checkbox", disabled: true });
    box.checked = task[1] !== " ";
    item.prepend(box);
  }
  return item;
}

const tableStarts = (lines, at) =>
  lines[at].includes("|") && lines[at + 1]?.includes("-") && DELIMITERS.test(lines[at + 1]) &&
  cellsOf(lines[at]).length === cellsOf(lines[at + 1]).length;

function cellsOf(line) {
  const bare = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return bare.split(/(?<!\\)\|/).map((own) => own.trim().replaceAll("\\|", "|"));
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return [end, () => {
    const sides = cellsOf(lines[at + 1]).map((own) =>
      own.endsWith(":") ? (own.startsWith(":") ? "middle" : "right") : "");
    const row = (line, name) => {
      const cells = cellsOf(line);
      return element("tr", "", ...sides.map((side, i) => element(name, side, inline(cells[i] ?? ""))));
    };
    const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
    const made = element("table", "", element("thead", "", row(lines[at], "th")), element("tbody", "", ...body));
    return element("div", "scroll", made);
  }];
}

// The nodes of a paragraph's text. Each mark is looked for at most once in vain, so the time is linear.
function inline(text, depth = 0) {
  const out = document.createDocumentFragment();
  const missing = new Set();
  let plain = "";
  let at = 0;
  const find = (mark, from) => {
    if (missing.has(mark)) return -1;
    const place = text.indexOf(mark, from);
    if (place < 0) missing.add(mark);
    return place;
  };
  const add = (node, end) => {
    if (plain) out.append(plain);
    plain = "";
    out.append(node);
    at = end;
  };
  while (at < text.length) {
    const next = depth < DEEPEST ? marked(text, at, find, depth) : null;
    if (next) { add(next[0], next[1]); continue; }
    if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) at += 1;
    plain += text[at];
    at += 1;
  }
  if (plain) out.append(plain);
  return out;
}

// The node that starts at a place and where it ends; null if plain text is there.
function marked(text, at, find, depth) {
  const char = text[at];
  if (char === "\n") return [element("br"), at + 1];
  if (char === "`") return codeSpan(text, at, find);
  if (char === "*" || char === "_" || char === "~") return emphasis(text, at, find, depth);
  if (char === "[" || (char === "!" && text[at + 1] === "[")) return link(text, at, find, depth);
  if (char === "<") {
    const broken = /^<br\s*[/]?>/i.exec(text.slice(at, at + 8));
    if (broken) return [element("br"), at + broken[0].length];
  }
  if (char === "h" || char === "H") {
    BARE.lastIndex = at;
    const bare = LETTER.test(text[at - 1] ?? "") ? null : BARE.exec(text);
    if (bare) return [anchor(bare[0], bare[0]), at + bare[0].length];
  }
  return null;
}

function codeSpan(text, at, find) {
  let size = 1;
  while (text[at + size] === "`") size += 1;
  const mark = "`".repeat(size);
  let end = find(mark, at + size);
  while (end >= 0 && text[end + size] === "`") {
    while (text[end] === "`") end += 1;
    end = find(mark, end);
  }
  if (end < 0) return [document.createTextNode(mark), at + size];
  const inner = text.slice(at + size, end).replaceAll("\n", " ");
  const shown = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() ? inner.slice(1, -1) : inner;
  return [element("code", "", shown), end + size];
}

function emphasis(text, at, find, depth) {
  const char = text[at];
  const double = text[at + 1] === char;
  if (char === "~" && !double) return null;
  const mark = double ? char + char : char;
  const start = at + mark.length;
  if (!text[start] || /\s/.test(text[start])) return [document.createTextNode(mark), start];
  if (char === "_" && LETTER.test(text[at - 1] ?? "")) return [document.createTextNode(mark), start];
  for (let end = find(mark, start + 1); end >= 0; end = find(mark, end + mark.length)) {
    while (double && text[end + 2] === char) end += 1;
    if (!double && text[end + 1] === char) { // the mark of a stronger one inside
      end += 1;
      continue;
    }
    if (/\s/.test(text[end - 1])) continue;
    if (char === "_" && LETTER.test(text[end + mark.length] ?? "")) continue;
    const name = char === "~" ? "del" : double ? "strong" : "em";
    return [element(name, "", inline(text.slice(start, end), depth + 1)), end + mark.length];
  }
  return [document.createTextNode(mark), start];
}

// A link; an image is a link too, because the page loads nothing from elsewhere.
function link(text, at, find, depth) {
  const start = at + (text[at] === "!" ? 2 : 1);
  const middle = find("](", start);
  if (middle < 0) return null;
  const label = text.slice(start, middle);
  if (label.includes("[") || label.includes("\n\n")) return null;
  let [end, open] = [middle + 2, 1];
  for (; end < text.length && end < middle + 4096; end += 1) {
    if (text[end] === "(") open += 1;
    if (text[end] === ")" && (open -= 1) === 0) break;
  }
  if (open) return null;
  const target = text.slice(middle + 2, end).trim().split(/\s/)[0].replace(/^<|>$/g, "");
  return [anchor(target, depth < DEEPEST ? inline(label, depth + 1) : label), end + 1];
}

function anchor(target, label) {
  if (!LINK.test(target)) return element("span", "", label);
  const made = element("a", "", label);
  made.href = target;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}
