// Canvases: lines, the composition of a batch, and the page map.

const GOLDEN = 137.508; // degrees: neighbours in number are far apart in hue

export const color = (id) => `hsl(${(id * GOLDEN) % 360} 55% 55%)`;

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function context(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width, height];
}

// A line over the whole width, filled below. A time without a value keeps the one before.
export function line(canvas, points) {
  const [pen, width, height] = context(canvas, canvas.clientHeight);
  const known = [];
  for (const value of points) {
    if (value !== null) known.push(value);
    else if (known.length) known.push(known.at(-1));
  }
  if (!known.length) return;
  if (known.length === 1) known.push(known[0]);
  const most = Math.max(...known, 1e-9);
  pen.strokeStyle = pen.fillStyle = style("--accent");
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";
  pen.beginPath();
  known.forEach((value, index) => {
    pen.lineTo((index / (known.length - 1)) * width, height - 1 - (value / most) * (height - 3));
  });
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(0, height);
  pen.globalAlpha = 0.14;
  pen.fill();
  pen.globalAlpha = 1;
}

export function bars(canvas, decode, prefill) {
  const [pen, width, height] = context(canvas, canvas.clientHeight);
  pen.fillStyle = style("--free");
  pen.fillRect(0, 0, width, height);
  const all = Math.max(decode + prefill, 1);
  pen.fillStyle = style("--accent");
  pen.fillRect(0, 0, (decode / all) * width, height);
  pen.fillStyle = style("--shared");
  pen.fillRect((decode / all) * width, 0, (prefill / all) * width, height);
}

export function cells(canvas, map, running) {
  const total = map.reduce((sum, [, count]) => sum + count, 0);
  const width = canvas.clientWidth;
  const edge = Math.max(3, Math.min(14, Math.floor(Math.sqrt((width * 140) / Math.max(total, 1)))));
  const columns = Math.max(1, Math.floor(width / edge));
  const height = Math.ceil(total / columns) * edge;
  canvas.style.height = `${height}px`;
  const [pen] = context(canvas, height);
  const names = { "-1": style("--free"), "-2": style("--kept"), "-3": style("--shared") };
  let cell = 0;
  for (const [owner, count] of map) {
    pen.fillStyle = owner < 0 ? names[owner] : color(running[owner].id);
    for (let i = 0; i < count; i += 1, cell += 1) {
      pen.fillRect((cell % columns) * edge, Math.floor(cell / columns) * edge, edge - 1, edge - 1);
    }
  }
}
