// The live view: steps of a running server over its event stream. Nothing here decides anything.

const live = { hello: null, steps: [], requests: new Map(), queue: [], last: null, key: "", follow: true, hover: null, limits: { ttft: 0, itl: 0 }, series: [] };
const LETTERS = { p: PREFILL, d: DECODE, a: AGAIN, h: HELD };
const KEEP = 3000;

// ---- the stream ----

async function follow() {
  for (;;) {
    try {
      const response = await fetch("lab/events", { headers: live.key ? { authorization: `Bearer ${live.key}` } : {}, cache: "no-store" });
      if (response.status === 401) { askKey(); return; }
      if (!response.ok) throw new Error(`the server answers ${response.status}`);
      gate.hidden = true;
      const reader = response.body.getReader(), decoder = new TextDecoder();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
        rest = parts.pop();
        for (const part of parts) if (part.startsWith("data: ")) hear(JSON.parse(part.slice(6)));
      }
      say("The server has ended the stream. Trying again …");
    } catch (problem) { say(`No connection (${problem.message}). Trying again …`); }
    await new Promise((wait) => setTimeout(wait, 1500));
  }
}
function hear(message) {
  if (message.seats !== undefined) {
    live.hello = message;
    live.steps = [];
    live.who = new Array(message.seats).fill(0);
    for (const [seat, number] of message.who) live.who[seat] = number;
    title.textContent = `${message.model}, ${DATA.label}, ${message.seats} seats`;
    say("");
    return;
  }
  for (const [at, ms, tokens, waiting, seats, who, preempted] of message.steps) {
    for (const [seat, number] of who) live.who[seat] = number;
    live.steps.push({ at, ms, tokens, waiting, seats, who: live.who.slice(), preempted });
  }
  if (live.steps.length > KEEP) live.steps.splice(0, live.steps.length - KEEP);
  live.queue = message.queue;
  for (const [number, prompt, output, most, age] of [...message.queue, ...message.requests]) live.requests.set(number, { prompt, output, most, age, seen: message.now });
  if (live.requests.size > 4000) for (const number of [...live.requests.keys()].slice(0, 2000)) live.requests.delete(number);
  live.last = message;
  live.series.push({ at: message.now, waiting: message.waiting, used: message.used, ttft: message.ttft, itl: message.itl });
  if (live.series.length > 600) live.series.shift();
  document.body.dataset.steps = Number(document.body.dataset.steps || 0) + message.steps.length;
  if (live.follow) redraw();
}

// ---- the page ----

const title = el("span", {}, ""), note = el("div", { class: "error", role: "status", hidden: true });
function say(words) { note.hidden = !words; note.textContent = words; }
const gate = el("form", { class: "box story", hidden: true, onsubmit: (e) => { e.preventDefault(); live.key = gate.querySelector("input").value.trim(); try { sessionStorage.setItem("hopon-key", live.key); } catch { /* asked again next time */ } follow(); } },
  el("h2", {}, "This server wants a key"), el("div", { class: "pair", style: "max-width:460px" }, el("input", { type: "password", "aria-label": "API key", autocomplete: "off", placeholder: "API key", style: "flex:1" }), el("button", { class: "primary" }, "Show")));
function askKey() { gate.hidden = false; gate.querySelector("input").focus(); say(live.key ? "That key is not known here." : ""); }

function tile(name, words) { const b = el("b", {}, "–"), small = el("small", {}, words); return { node: el("div", { class: "tile", "data-tile": name }, b, small), set(value, text, bad) { b.textContent = value; if (text) small.textContent = text; b.style.color = bad ? "var(--bad)" : ""; } }; }
const tiles = { running: tile("running", "running"), waiting: tile("waiting", "waiting"), step: tile("step", "per step"), rate: tile("rate", "tokens/s"), kv: tile("kv", "KV memory"), ttft: tile("ttft", "TTFT p50 / p95"), itl: tile("itl", "ITL p50 / p95") };
const grid = el("canvas", { class: "zoom", role: "img", "aria-label": "Seats over the last steps" }), curves = el("canvas", { role: "img", "aria-label": "Queue, KV memory and latencies over the last minutes" });
const chips = el("div", { class: "chips" }), reason = el("p", { class: "why" }), caption = el("span", {}), queueLabel = el("div", { class: "label" }, "Waiting");

const STEP_WIDTH = 7;
function seatHeight() { return Math.max(4, Math.min(20, Math.floor(380 / live.hello.seats))); }
function visible(width) {
  const shown = Math.max(1, Math.floor(width / STEP_WIDTH)), end = live.steps.length;
  return live.steps.slice(Math.max(0, end - shown), end);
}
function drawSeats() {
  const rh = seatHeight(), height = rh * live.hello.seats, [c, width] = fit(grid, height), steps = visible(width), offset = width - steps.length * STEP_WIDTH;
  c.fillStyle = COLOUR.empty;
  c.fillRect(0, 0, width, height);
  steps.forEach((step, i) => {
    const x = offset + i * STEP_WIDTH, waits = step.waiting.some((n) => n);
    if (waits) { c.fillStyle = pattern(c, "hatch"); c.fillRect(x, 0, STEP_WIDTH, height); }
    for (let row = 0; row < step.seats.length; row++) {
      const kind = LETTERS[step.seats[row]];
      if (kind === undefined) continue;
      c.fillStyle = COLOUR.kinds[kind];
      if (kind === HELD) c.fillRect(x, row * rh + rh / 3, STEP_WIDTH, rh / 3);
      else c.fillRect(x, row * rh, STEP_WIDTH - 1, rh - (rh > 5 ? 1 : 0));
      if (live.hover && step.who[row] === live.hover) { c.fillStyle = COLOUR.ink; c.fillRect(x, row * rh + rh - 3, STEP_WIDTH, 2); }
    }
    if (step.preempted) { c.fillStyle = COLOUR.mark; triangle(c, x + STEP_WIDTH / 2, 0, 8); }
  });
  if (rh > 11) {
    c.font = "11px system-ui,sans-serif";
    c.textBaseline = "middle";
    c.lineWidth = 2.4;
    c.strokeStyle = "rgba(0,0,0,.55)";
    for (let row = 0; row < live.hello.seats; row++) {
      let from = 0;
      for (let i = 1; i <= steps.length; i++)
        if (i === steps.length || steps[i].who[row] !== steps[from].who[row]) {
          const number = steps[from].who[row], words = `#${number}`;
          while (from < i && steps[from].seats[row] === "p" && i - from > 1) from++; // a prompt keeps its colour
          if (number && (i - from) * STEP_WIDTH > c.measureText(words).width + 6) {
            c.strokeText(words, offset + from * STEP_WIDTH + 3, row * rh + rh / 2);
            c.fillStyle = "#fff";
            c.fillText(words, offset + from * STEP_WIDTH + 3, row * rh + rh / 2);
          }
          from = i;
        }
    }
  }
  return steps;
}
function drawCurves() {
  const [c, width] = fit(curves, 150), half = width < 560 ? 1 : 2, w = width / half - 10, rows = 4 / half, h = 150 / rows - 16;
  const panes = [["waiting", COLOUR.soft, (s) => s.waiting, (v) => `${count(v)} wait`], ["KV memory", COLOUR.accent, (s) => s.used, (v) => percent(v), 1],
    ["TTFT p95", COLOUR.prefill, (s) => s.ttft && s.ttft[1], (v) => duration(v), 0, live.limits.ttft], ["ITL p95", COLOUR.decode, (s) => s.itl && s.itl[1], (v) => duration(v), 0, live.limits.itl]];
  c.font = "11.5px system-ui,sans-serif";
  c.textBaseline = "top";
  panes.forEach(([name, colour, value, show, top, limit], i) => {
    const x = (i % half) * (w + 20), y = Math.floor(i / half) * (h + 16), values = live.series.map(value), most = Math.max(top || 0, limit ? limit * 1.15 : 0, ...values.filter((v) => v !== null)) || 1;
    c.fillStyle = COLOUR.sunk;
    c.fillRect(x, y + 14, w, h - 2);
    c.beginPath();
    c.strokeStyle = colour;
    c.lineWidth = 1.8;
    let pen = false;
    values.forEach((v, j) => {
      if (v === null || v === undefined) { pen = false; return; }
      const px = x + w - ((live.series.length - 1 - j) * w) / 480, py = y + 12 + h - (v / most) * (h - 4);
      if (px >= x) { if (pen) c.lineTo(px, py); else c.moveTo(px, py); pen = true; }
    });
    c.stroke();
    if (limit) { c.strokeStyle = COLOUR.mark; c.setLineDash([4, 3]); c.beginPath(); c.moveTo(x, y + 12 + h - (limit / most) * (h - 4)); c.lineTo(x + w, y + 12 + h - (limit / most) * (h - 4)); c.stroke(); c.setLineDash([]); }
    const now = values.at(-1);
    c.textAlign = "left";
    c.fillStyle = COLOUR.soft;
    c.fillText(`${name}${limit ? `, limit ${duration(limit)}` : ""}`, x, y);
    c.textAlign = "right";
    c.fillStyle = limit && now > limit ? COLOUR.mark : COLOUR.ink;
    c.fillText(now === null || now === undefined ? "–" : show(now), x + w, y);
  });
}
function drawAll() {
  if (!live.hello) return;
  const steps = drawSeats(), last = live.last;
  drawCurves();
  caption.textContent = steps.length ? `The last ${count(steps.length)} steps, ${duration(steps.at(-1).at - steps[0].at)}` : "No step yet: send the server a request.";
  if (!last) return;
  const recent = live.steps.filter((step) => step.at > last.now - 5000), answers = recent.reduce((n, step) => n + (step.seats.match(/d/g) || []).length, 0);
  tiles.running.set(count(last.running), `of ${live.hello.seats} seats`);
  tiles.waiting.set(count(last.waiting));
  tiles.step.set(recent.length ? duration(recent.reduce((sum, step) => sum + step.ms, 0) / recent.length) : "–", recent.length ? `per step, ${count(recent.reduce((sum, step) => sum + step.tokens, 0) / recent.length)} tokens` : "per step");
  tiles.rate.set(count(answers / 5), "answer tokens/s");
  tiles.kv.set(percent(last.used), `of ${count(live.hello.blocks)} KV blocks`);
  const pair = (name, value) => tiles[name].set(value ? `${duration(value[0])} / ${duration(value[1])}` : "–", `${name.toUpperCase()} p50 / p95${live.limits[name] ? `, limit ${duration(live.limits[name])}` : ""}`, value && live.limits[name] && value[1] > live.limits[name]);
  pair("ttft", last.ttft);
  pair("itl", last.itl);
  queueLabel.textContent = `Waiting ${count(last.waiting)}`;
  chips.replaceChildren(...live.queue.map(([number]) => el("button", { class: "chip", "data-request": number }, `#${number}`)), ...(last.waiting > live.queue.length ? [el("span", { class: "chip more" }, `+ ${count(last.waiting - live.queue.length)}`)] : []), ...(last.waiting ? [] : [el("span", { class: "label" }, "Nobody waits.")]));
  reason.replaceChildren(...whyNow(last));
}
function whyNow(last) {
  const newest = live.steps.at(-1);
  if (!last.waiting || !newest) return ["Nobody waits just now."];
  const [seats, tokens, blocks, order] = newest.waiting, first = live.queue[0] ? `#${live.queue[0][0]}` : "the first";
  const words = seats ? `No seat is free: all ${live.hello.seats} are taken. Whoever ends next lets the first in line in.` : tokens ? `No tokens are left: each step spends its budget (${count(live.hello.budget)}) on those ahead.`
    : blocks ? "No memory: too few KV blocks are free for what it needs to start, and nobody overtakes it." : order ? `Not its turn by this system’s rule. ${DATA.card.joins || ""}` : "It has just arrived; the step that runs has to end first.";
  return [el("b", {}, `Why ${first} waits: `), words];
}
let pending = false;
function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; drawAll(); });
}
function describe(number, kind) {
  const r = live.requests.get(number);
  return [el("h4", {}, `#${number} ${kind === undefined ? "waits" : KIND[kind]}`), r ? facts([["Prompt", `${count(r.prompt)} tokens`], ["Answer so far", `${count(r.output)}${r.most ? ` of at most ${count(r.most)}` : ""} tokens`], ["Since its arrival", duration(r.age)]]) : ""];
}
grid.addEventListener("pointermove", (event) => {
  if (!live.hello) return;
  const box = grid.getBoundingClientRect(), steps = visible(box.width), i = Math.floor((event.clientX - box.left - (box.width - steps.length * STEP_WIDTH)) / STEP_WIDTH), row = Math.floor((event.clientY - box.top) / seatHeight()), step = steps[i];
  if (!step) { hideTip(); return; }
  const number = step.who[row], kind = LETTERS[step.seats[row]];
  live.hover = number || null;
  redraw();
  if (number && kind !== undefined) showTip(event, describe(number, kind));
  else showTip(event, [el("h4", {}, `Seat ${row + 1} is empty`), facts([["Step took", duration(step.ms)], ["Tokens", count(step.tokens)]])]);
});
grid.addEventListener("pointerleave", () => { live.hover = null; hideTip(); redraw(); });
chips.addEventListener("pointerover", (event) => { const id = Number(event.target.dataset.request); if (id) showTip(event, describe(id)); });
chips.addEventListener("pointerout", hideTip);

function limitField(name, words) {
  return el("label", { class: "limit" }, `${words} limit `, el("input", { type: "number", min: 0, step: 10, value: live.limits[name] || "", placeholder: "none", style: "width:6.5em", "aria-label": `${words} limit in milliseconds`, onchange: (e) => { live.limits[name] = Math.max(0, Number(e.target.value) || 0); writeLimits(); redraw(); } }), " ms");
}
function writeLimits() { const words = new URLSearchParams(); for (const [name, value] of Object.entries(live.limits)) if (value) words.set(name, value); history.replaceState(null, "", `#${words}`); }
function start() {
  startTheme();
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of ["ttft", "itl"]) live.limits[name] = Number(given.get(name)) || 0;
  try { live.key = sessionStorage.getItem("hopon-key") || ""; } catch { /* asked for */ }
  const pause = el("button", { class: "primary", title: "Stop the picture, not the server (space)", onclick: () => { live.follow = !live.follow; pause.textContent = live.follow ? "❚❚ Pause" : "▶ Follow"; redraw(); } }, "❚❚ Pause");
  document.addEventListener("keydown", (event) => { if (event.key === " " && !["INPUT", "BUTTON"].includes(event.target.tagName)) { event.preventDefault(); pause.click(); } });
  document.getElementById("app").append(el("div", { class: "top" }, el("h1", {}, el("b", {}, "hopon"), " live"), el("p", {}, title), themeButton(redraw)),
    el("div", { class: "layout single" }, el("main", { class: "main" }, note, gate, el("section", { class: "box transport" }, pause, limitField("ttft", "TTFT"), limitField("itl", "ITL"), legend(true)),
      el("section", { class: "box panel" }, el("div", { class: "tiles" }, ...Object.values(tiles).map((one) => one.node)), grid, el("div", { class: "caption" }, caption, el("span", {}, "a row is a seat, a column is a step, now is at the right")),
        el("div", { class: "line" }, queueLabel, chips), reason, DATA.card.short_waits ? el("p", { class: "short" }, el("b", {}, "Why a short request waits in this system: "), DATA.card.short_waits) : null),
      el("section", { class: "box panel" }, el("div", { class: "caption" }, el("span", {}, "The last two minutes; percentiles are those of the last 15 s")), curves))), tip);
  new ResizeObserver(redraw).observe(grid);
  follow();
}
start();
