"use strict";
// What both pages share: elements, colours, numbers in words, and a run as it is drawn. No scheduling happens here.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PREFILL = 0, DECODE = 1, AGAIN = 2, HELD = 3, PADDING = 4;
const KIND = ["computes its prompt", "writes its answer", "computes again what it had lost", "keeps its seat, computes nothing", "padding"];

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const count = (n) => Math.round(n).toLocaleString("en");
const percent = (share) => (share === null || Number.isNaN(share) ? "–" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`);
function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 1000) return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
  return ms < 100000 ? `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s` : `${count(ms / 1000)} s`;
}

// ---- colours ----

const COLOUR = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "faint", "line", "paper", "card", "sunk", "accent", "prefill", "decode", "again", "held", "padding", "empty", "hatch", "wasted", "mark"])
    COLOUR[name] = style.getPropertyValue(`--${name}`).trim();
  COLOUR.kinds = [COLOUR.prefill, COLOUR.decode, COLOUR.again, COLOUR.held, COLOUR.padding];
  patterns.clear();
}
const patterns = new Map();
function pattern(context, name) {
  if (patterns.has(name)) return patterns.get(name);
  const size = 6, tile = document.createElement("canvas"), ratio = devicePixelRatio || 1;
  tile.width = tile.height = Math.round(size * ratio);
  const c = tile.getContext("2d");
  c.scale(tile.width / size, tile.height / size);
  c.fillStyle = name === "hatch" ? COLOUR.wasted : COLOUR.empty;
  c.fillRect(0, 0, size, size);
  c.strokeStyle = name === "hatch" ? COLOUR.hatch : COLOUR.padding;
  c.lineWidth = name === "hatch" ? 1 : 2.2;
  c.beginPath();
  for (const shift of [-size, 0, size])
    if (name === "hatch") { c.moveTo(shift - 1, size + 1); c.lineTo(shift + size + 1, -1); }
    else { c.moveTo(shift - 1, -1); c.lineTo(shift + size + 1, size + 1); }
  c.stroke();
  const made = context.createPattern(tile, "repeat");
  made.setTransform(new DOMMatrix().scale(size / tile.width));
  patterns.set(name, made);
  return made;
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  try { localStorage.setItem("hopon-theme", theme); } catch { /* a page from a file may have no storage */ }
  readColours();
}
function startTheme() {
  let theme = "";
  try { theme = localStorage.getItem("hopon-theme") || ""; } catch { /* see above */ }
  setTheme(theme);
}
function isDark() {
  return (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
}
function themeButton(redraw) {
  const words = () => (isDark() ? "☀ Light" : "☾ Dark");
  const button = el("button", { class: "plain", title: "Light or dark", onclick: () => { setTheme(isDark() ? "light" : "dark"); button.textContent = words(); redraw(); } }, words());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); button.textContent = words(); redraw(); });
  return button;
}

function legend(live) {
  const item = (style, words, kind = "") => el("span", {}, el("i", { class: kind, style: style ? `background:var(--${style})` : null }), words);
  return el("div", { class: "legend" }, item("prefill", "prompt (prefill)"), item("decode", "answer (decode)"), item("again", "again, after a preemption"),
    item("held", "keeps its seat, computes nothing"), item("", "empty though somebody waits", "hatched"), item("empty", "empty, nobody waits"),
    live ? null : item("", "padding", "padded"), el("span", {}, el("b", { style: "color:var(--mark)" }, "▼"), "preempted"));
}

function fit(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth || 300;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

// ---- a run ----

class Run {
  constructor(data) {
    Object.assign(this, data);
    const { start, length, useful, waiting, blocks } = this.steps;
    this.num = start.length;
    this.runs = this.rows.map((flat) => {
      const runs = [];
      for (let i = 0; i < flat.length; i += 5) runs.push({ first: flat[i], end: flat[i] + flat[i + 1], request: flat[i + 2], kind: flat[i + 3], tokens: flat[i + 4] });
      return runs;
    });
    this.last = new Map(); // request -> step behind its last one in a seat
    for (const runs of this.runs) for (const run of runs) if (run.request >= 0) this.last.set(run.request, Math.max(run.end, this.last.get(run.request) || 0));
    this.usefulUntil = [0];
    for (const n of useful) this.usefulUntil.push(this.usefulUntil.at(-1) + n);
    this.request = new Map(this.requests.map((row) => [row[0], Object.fromEntries(this.columns.map((name, i) => [name, row[i]]))]));
    this.endings = [...this.request.values()].filter((r) => r.ended !== null && !r.message).map((r) => r.ended).sort((a, b) => a - b);
    this.refused = [...this.request.values()].filter((r) => r.message).length;
    this.bands = []; // stretches in which somebody waits
    for (let i = 0; i < this.num; i++) {
      if (!waiting[i]) continue;
      const band = this.bands.at(-1);
      if (band && band[1] === i) band[1] = i + 1; else this.bands.push([i, i + 1]);
    }
    this.mostWaiting = Math.max(1, ...chunked(waiting, Math.max));
    this.mostBlocks = this.settings.num_blocks;
    this.seconds = this.num ? start[this.num - 1] + length[this.num - 1] : 0;
    this.peakBlocks = Math.max(0, ...chunked(blocks, Math.max));
  }
  // place of a step's beginning on the axis
  x(step, axis) {
    if (axis === "pass") return step;
    return step < this.num ? this.steps.start[step] : this.seconds;
  }
  xEnd(step, axis) { // of the end of the step before
    if (axis === "pass" || step < 1) return axis === "pass" ? step : 0;
    return this.steps.start[step - 1] + this.steps.length[step - 1];
  }
  // passes that have begun at a place on the axis
  stepAt(x, axis) {
    if (axis === "pass") return Math.max(0, Math.min(this.num, Math.floor(x)));
    let low = 0, high = this.num;
    while (low < high) { const mid = (low + high) >> 1; if (this.steps.start[mid] <= x) low = mid + 1; else high = mid; }
    return low;
  }
  span(axis) { return axis === "pass" ? this.num : this.seconds; }
  at(row, step) { // the run in a seat, or undefined
    const runs = this.runs[row] || [];
    let low = 0, high = runs.length;
    while (low < high) { const mid = (low + high) >> 1; if (runs[mid].end <= step) low = mid + 1; else high = mid; }
    return low < runs.length && runs[low].first <= step ? runs[low] : undefined;
  }
  queueAt(step) {
    let low = 0, high = this.queue.length;
    while (low < high) { const mid = (low + high) >> 1; if (this.queue[mid][0] <= step) low = mid + 1; else high = mid; }
    return low ? this.queue[low - 1][1] : [];
  }
  now(k) { return this.xEnd(k, "time"); } // simulated time after k passes
  finished(k) {
    const now = this.now(k) + 1e-6;
    let low = 0, high = this.endings.length;
    while (low < high) { const mid = (low + high) >> 1; if (this.endings[mid] <= now) low = mid + 1; else high = mid; }
    return k >= this.num ? this.endings.length : low;
  }
  preempted(k) { let n = 0; for (const [at] of this.evictions) if (at < k) n++; return n; }
  seatsAt(step) { return this.runs.map((_, row) => this.at(row, step)); }
}
function* chunked(values, f) { // Math.max takes so many arguments only
  for (let i = 0; i < values.length; i += 5000) yield f(...values.slice(i, i + 5000));
}

// ---- why ----

function longest(run, step) {
  let found = null;
  for (const one of run.seatsAt(step)) if (one && one.request >= 0 && (!found || run.last.get(one.request) > run.last.get(found.request))) found = one;
  return found;
}
function why(run, step, request) {
  const queue = run.queueAt(step), place = request === undefined ? 0 : queue.indexOf(request);
  const ahead = place > 0 ? `${place} ahead of it in line. ` : place < 0 ? "Many are ahead of it in line. " : "";
  switch (run.steps.reason[step]) {
    case 1: return `${ahead}No seat is free: all ${run.seats} are taken. Whoever ends next lets the first in line in.`;
    case 2: return `${ahead}No tokens are left: this pass spends its budget (${count(run.settings.max_num_batched_tokens)}) on those ahead.`;
    case 3: {
      const free = run.settings.num_blocks - run.steps.blocks[step];
      return place ? `${ahead}The first in line finds no memory, and nobody overtakes it.` : `No memory: ${count(free)} of ${count(run.settings.num_blocks)} KV blocks are free, too few for what it needs to start.`;
    }
    case 4: {
      if (run.rule !== "batch") return `${ahead}Not its turn by this system’s rule. ${run.card.joins || ""}`;
      const last = longest(run, step);
      return `${ahead}A batch is running and nobody joins it. It ends with its longest answer` + (last ? `: #${last.request}, ${count(run.last.get(last.request) - step)} passes to go.` : ".");
    }
    default: return "";
  }
}

// ---- pictures ----

const QUEUE_HEIGHT = 26, GAP = 5;
function rowHeight(seats, whole) { return Math.max(2, Math.min(whole ? 11 : 18, Math.floor((whole ? 150 : 230) / seats))); }

function drawOverview(canvas, run, view) {
  const rh = rowHeight(run.seats, true), rows = rh * run.seats, height = rows + 2 * (GAP + QUEUE_HEIGHT);
  const [c, width] = fit(canvas, height), scale = width / view.span, axis = view.axis;
  const X = (step) => run.x(step, axis) * scale, XE = (step) => run.xEnd(step, axis) * scale;
  c.fillStyle = COLOUR.empty;
  c.fillRect(0, 0, XE(run.num), rows);
  c.fillStyle = pattern(c, "hatch");
  for (const [first, end] of run.bands) c.fillRect(X(first), 0, XE(end) - X(first), rows);
  for (let row = 0; row < run.seats; row++)
    for (const one of run.runs[row]) {
      const x = X(one.first), w = XE(one.end) - x;
      c.fillStyle = one.kind === PADDING ? pattern(c, "pad") : COLOUR.kinds[one.kind];
      c.fillRect(x, row * rh, Math.max(w - (w > 3 && one.kind !== PADDING ? 0.6 : 0), one.kind === PREFILL || one.kind === AGAIN ? 1 : 0.4), rh - (rh > 4 ? 1 : 0));
    }
  c.fillStyle = COLOUR.mark;
  for (const [step, , row] of run.evictions) if (row >= 0) triangle(c, X(step), row * rh, Math.min(rh, 6));
  // the queue, and KV memory
  const floor = rows + GAP + QUEUE_HEIGHT, bottom = floor + GAP + QUEUE_HEIGHT;
  const graph = (values, most, base, fill) => {
    c.beginPath();
    c.moveTo(0, base);
    const jump = Math.max(1, Math.floor(run.num / width / 2));
    for (let i = 0; i < run.num; i += jump) {
      let value = 0;
      for (let j = i; j < Math.min(run.num, i + jump); j++) value = Math.max(value, values[j]);
      const y = base - (QUEUE_HEIGHT * value) / most;
      c.lineTo(X(i), y);
      c.lineTo(XE(Math.min(run.num, i + jump)), y);
    }
    c.lineTo(XE(run.num), base);
    c.closePath();
    c.globalAlpha = 0.55;
    c.fillStyle = fill;
    c.fill();
    c.globalAlpha = 1;
  };
  graph(run.steps.waiting, view.mostWaiting, floor, COLOUR.faint);
  graph(run.steps.blocks, run.mostBlocks, bottom, COLOUR.accent);
  let waited = null;
  if (view.hover !== null) {
    c.strokeStyle = COLOUR.ink;
    c.lineWidth = 1.6;
    run.runs.forEach((runs, row) => { for (const one of runs) if (one.request === view.hover) c.strokeRect(X(one.first), row * rh + 0.5, Math.max(2, XE(one.end) - X(one.first)), rh - 1); });
    const r = run.request.get(view.hover); // how long it waited for its first seat
    if (r) {
      const place = (ms) => (axis === "time" ? ms : run.stepAt(ms - 1e-6, "time")) * scale, from = place(r.arrival);
      waited = [from, Math.max(from + 2, r.admitted === null ? XE(run.num) : place(r.admitted))];
    }
  }
  // what is still to come is paler, the playhead a line
  const head = XE(view.k);
  c.fillStyle = COLOUR.card;
  c.globalAlpha = 0.5;
  if (view.k < run.num) c.fillRect(head, 0, XE(run.num) - head + 1, height);
  c.globalAlpha = 1;
  if (waited) {
    c.fillStyle = COLOUR.mark;
    c.fillRect(waited[0], rows + 1, waited[1] - waited[0], 4);
  }
  c.font = "11px system-ui,sans-serif";
  c.textBaseline = "top";
  label(c, `waiting: ${run.mostWaiting} at most`, width, rows + GAP + 1);
  label(c, `KV memory: ${percent(run.peakBlocks / run.mostBlocks)} at most`, width, floor + GAP + 1);
  c.fillStyle = COLOUR.ink;
  c.fillRect(Math.min(width - 1.5, view.x * scale - 0.75), 0, 1.5, height);
}
function label(c, words, width, y) {
  const w = c.measureText(words).width + 8;
  c.fillStyle = COLOUR.card;
  c.globalAlpha = 0.8;
  c.fillRect(width - w, y, w, 13);
  c.globalAlpha = 1;
  c.fillStyle = COLOUR.soft;
  c.textAlign = "right";
  c.fillText(words, width - 4, y + 1);
}
function triangle(c, x, y, size) {
  c.beginPath();
  c.moveTo(x - size * 0.7, y);
  c.lineTo(x + size * 0.7, y);
  c.lineTo(x, y + size);
  c.closePath();
  c.fill();
}

function zoomWindow(run, width, k, cell) {
  const shown = Math.max(1, Math.floor(width / cell));
  const first = Math.max(0, Math.min(run.num - shown, k - Math.ceil(shown * 0.62)));
  return [first, Math.min(run.num, first + shown)];
}
function drawZoom(canvas, run, view, cell) {
  const rh = rowHeight(run.seats, false), height = rh * run.seats;
  const [c, width] = fit(canvas, height), [first, end] = zoomWindow(run, width, view.k, cell);
  c.font = `${Math.min(11, rh - 4)}px system-ui,sans-serif`;
  c.textBaseline = "middle";
  c.textAlign = "left";
  for (let step = first; step < end; step++) {
    c.fillStyle = run.steps.waiting[step] ? pattern(c, "hatch") : COLOUR.empty;
    c.fillRect((step - first) * cell, 0, cell, height);
  }
  for (let row = 0; row < run.seats; row++) {
    const y = row * rh, runs = run.runs[row];
    for (const one of runs) {
      if (one.end <= first || one.first >= end) continue;
      const a = Math.max(first, one.first), b = Math.min(end, one.end);
      c.fillStyle = one.kind === PADDING ? pattern(c, "pad") : COLOUR.kinds[one.kind];
      const x = (a - first) * cell, w = (b - a) * cell;
      if (one.kind === HELD && rh > 7) c.fillRect(x, y + rh / 3, w, rh / 3);
      else c.fillRect(x, y, w - (one.kind === DECODE ? 0 : 1), rh - 1);
      if (one.kind === DECODE && cell > 7 && rh > 6) { // one cell, one token
        c.fillStyle = COLOUR.card;
        c.globalAlpha = 0.28;
        for (let step = a; step < b; step++) c.fillRect((step + 1 - first) * cell - 1, y, 1, rh - 1);
        c.globalAlpha = 1;
      }
      if (one.request === view.hover && one.request >= 0) { c.strokeStyle = COLOUR.ink; c.lineWidth = 2; c.strokeRect(x + 1, y + 1, w - 2, rh - 3); }
    }
    for (let step = first; step < end; ) { // whose seat it is, once per stay
      const one = run.at(row, step);
      if (!one) { step++; continue; }
      let until = one.end;
      for (let next = run.at(row, until); next && next.request === one.request && until < end; next = run.at(row, until)) until = next.end;
      const lead = one.kind === PREFILL || one.kind === AGAIN ? Math.min(cell, (one.end - step) * cell) : 0; // keeps its colour
      const w = (Math.min(end, until) - step) * cell - lead, words = one.request < 0 ? "" : `#${one.request}`;
      if (rh > 9 && words && c.measureText(words).width + 4 < w) {
        c.fillStyle = one.kind === HELD ? COLOUR.ink : "#fff";
        c.lineWidth = 2.4;
        c.strokeStyle = "rgba(0,0,0,.55)";
        const x = (step - first) * cell + lead + 3;
        if (one.kind !== HELD) c.strokeText(words, x, y + rh / 2 - 0.5);
        c.fillText(words, x, y + rh / 2 - 0.5);
      }
      step = until;
    }
  }
  c.fillStyle = COLOUR.mark;
  for (const [step, , row] of run.evictions) if (row >= 0 && step >= first && step < end) triangle(c, (step - first) * cell, row * rh, Math.min(rh, 9));
  const head = (view.k - first) * cell;
  c.fillStyle = COLOUR.card;
  c.globalAlpha = 0.6;
  if (view.k < end) c.fillRect(head, 0, width - head, height);
  c.globalAlpha = 1;
  c.fillStyle = COLOUR.card;
  if (end - first < width / cell) c.fillRect((end - first) * cell, 0, width, height);
  c.strokeStyle = COLOUR.ink;
  c.lineWidth = 1.5;
  if (view.k > first) c.strokeRect(head - cell, 0.75, cell, height - 1.5);
  return [first, end];
}

// ---- what is told beside the pointer ----

const tip = el("div", { id: "tip", role: "tooltip" });
function showTip(event, content) {
  tip.replaceChildren(...content);
  tip.style.display = "block";
  const box = tip.getBoundingClientRect(), x = event.clientX, y = event.clientY;
  tip.style.left = `${Math.max(8, Math.min(innerWidth - box.width - 8, x + 16))}px`;
  tip.style.top = `${y + box.height + 24 > innerHeight ? Math.max(8, y - box.height - 14) : y + 16}px`;
}
function hideTip() { tip.style.display = "none"; }
function facts(rows) { return el("dl", {}, ...rows.filter(Boolean).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])); }
