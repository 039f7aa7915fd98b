// The lab: controls, playback and panels. Every run comes whole from the simulator behind /api/run, or from the file.

const IS_FILE = DATA.mode === "file";
const SPEEDS = [4, 15, 60, 150, 400, 1000]; // passes per second
const state = { setting: IS_FILE ? {} : { ...DATA.default }, runs: [], x: 1, axis: "pass", playing: false, speed: 2, hover: null, pinned: null };
const panels = [];

// ---- the address bar ----

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of given) {
    if (name === "at") state.start = Number(value);
    else if (name === "axis") state.axis = value === "time" ? "time" : "pass";
    else if (name === "speed") state.speed = Math.max(0, Math.min(SPEEDS.length - 1, Number(value) || 0));
    else if (IS_FILE || !(name in DATA.default)) continue;
    else if (name === "presets") state.setting.presets = value.split("|").filter(Boolean);
    else state.setting[name] = typeof DATA.default[name] === "number" ? Number(value) : value;
  }
}
function writeAddress() {
  const words = new URLSearchParams();
  if (!IS_FILE)
    for (const [name, value] of Object.entries(state.setting)) {
      const text = Array.isArray(value) ? value.join("|") : String(value), usual = DATA.default[name];
      if (text !== (Array.isArray(usual) ? usual.join("|") : String(usual))) words.set(name, text);
    }
  if (state.axis !== "pass") words.set("axis", state.axis);
  if (state.runs.length && Math.round(state.x) !== Math.round(firstLook())) words.set("at", Math.round(state.x));
  history.replaceState(null, "", `#${words}`);
}

// ---- controls ----

const SEATS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128];
const BLOCKS = [48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512, 768, 1024, 2048, 4096, 8192];
const CONTROLS = [
  ["Requests"],
  ["trace", "Lengths", "choice", { skewed: "skewed (the article’s)", drawn: "drawn" }, "Skewed: most answers are short, 15 % are long. Drawn: from the distributions that you give."],
  ["seed", "Seed", "seed", null, "The same seed gives the same requests."],
  ["requests", "Requests", "slide", [4, 8, 16, 32, 64, 128, 256, 512, 1000], "How many."],
  ["skew", "Skew of answers", "slide", Array.from({ length: 21 }, (_, i) => i / 20), "0: all answers have 64 tokens. 1: a few are twenty times as long.", (s) => s.trace === "skewed"],
  ["inputs", "Prompt tokens", "text", null, "512, 32-256, exp:MEAN:MAX", (s) => s.trace === "drawn"],
  ["outputs", "Answer tokens", "text", null, "512, 32-256, exp:MEAN:MAX", (s) => s.trace === "drawn"],
  ["arrivals", "Arrivals", "choice", { constant: "evenly spaced", poisson: "Poisson", gamma: "gamma" }, "How requests are spaced.", (s) => s.trace === "drawn"],
  ["rate", "Rate", "slide", [0, 0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64], "Requests per second.", (s) => s.trace === "drawn", (v) => (v ? `${v}/s` : "all at once")],
  ["speed", "Arrivals", "slide", [0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8, 1000], "So many times as fast.", (s) => s.trace === "skewed", (v) => (v === 1000 ? "all at once" : `× ${v}`)],
  ["Engine"],
  ["seats", "Seats", "slide", SEATS, "max_num_seqs: most requests that run at once.", null, (v) => v],
  ["chunk", "Prompt chunk", "slide", [16, 32, 64, 128, 256, 512, 1024, 0], "Most prompt tokens of one request in a pass.", null, (v) => (v ? `${v} tokens` : "no limit")],
  ["budget", "Budget of a pass", "slide", [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192], "max_num_batched_tokens: most tokens in a pass.", null, (v) => `${count(v)} tokens`],
  ["blocks", "KV memory", "slide", BLOCKS, "Blocks of 16 tokens. Few of them make memory the bottleneck.", null, (v) => `${count(v)} blocks`],
  ["Clock"],
  ["cost", "A pass takes", "choice", { passes: "the same time, always", linear: "22 ms + rows + prompt", distserve: "OPT-13B, A100 (fit)", roofline: "roofline of a model" }, "The cost model: how long a pass takes."],
  ["model", "Model", "choice", () => Object.fromEntries((DATA.models || []).map((name) => [name, name])), "", (s) => s.cost === "roofline"],
  ["device", "Hardware", "choice", () => Object.fromEntries((DATA.devices || []).map((name) => [name, name])), "", (s) => s.cost === "roofline"],
];

function control([name, words, kind, options, hint, shown, format], change) {
  const value = state.setting[name], id = `c-${name}`;
  if (shown && !shown(state.setting)) return null;
  const set = (next, settle = true) => { state.setting[name] = next; change(name, settle); };
  if (kind === "choice") {
    const choices = typeof options === "function" ? options() : options;
    return el("label", { class: "control", title: hint }, el("span", {}, words), el("select", { id, onchange: (e) => set(e.target.value) },
      ...Object.entries(choices).map(([key, text]) => el("option", { value: key, selected: key === value }, text))));
  }
  if (kind === "text") return el("label", { class: "control", title: hint }, el("span", {}, words, el("output", {}, hint.split(",")[0] === "512" ? "512, 32-256, exp:64:512" : "")), el("input", { id, type: "text", value, spellcheck: "false", onchange: (e) => set(e.target.value) }));
  if (kind === "seed") {
    const field = el("input", { id, type: "number", value, min: 0, max: 4294967295, onchange: (e) => set(Math.max(0, Math.floor(Number(e.target.value) || 0))) });
    return el("label", { class: "control", title: hint }, el("span", {}, words), el("span", { class: "pair" }, field,
      el("button", { class: "icon", type: "button", title: "Another seed", "aria-label": "Another seed", onclick: (e) => { e.preventDefault(); field.value = Math.floor(Math.random() * 1e6); set(Number(field.value)); } }, "⚄")));
  }
  const values = options.includes(value) ? options : [...options, value].sort((a, b) => a - b);
  const show = format || ((v) => v), output = el("output", {}, String(show(value)));
  return el("label", { class: "control", title: hint }, el("span", {}, words, output), el("input", { id, type: "range", min: 0, max: values.length - 1, step: 1, value: values.indexOf(value), "aria-valuetext": String(show(value)),
    oninput: (e) => { const next = values[Number(e.target.value)]; output.textContent = show(next); e.target.setAttribute("aria-valuetext", show(next)); set(next, false); } }));
}

const fields = el("div", { class: "fields" });
function drawControls() {
  const change = (name, settle) => {
    if (name === "seats" && state.setting.budget < state.setting.seats) { state.setting.budget = Math.min(8192, 2 ** Math.ceil(Math.log2(state.setting.seats))); drawControls(); }
    if (name === "budget" && state.setting.budget < state.setting.seats) { state.setting.budget = 2 ** Math.ceil(Math.log2(Math.max(8, state.setting.seats))); drawControls(); }
    if (settle && (name === "trace" || name === "cost")) drawControls();
    ask();
  };
  const focused = document.activeElement && document.activeElement.id;
  fields.replaceChildren(...CONTROLS.map((entry) => (entry.length === 1 ? el("h2", {}, entry[0]) : control(entry, change))).filter(Boolean));
  if (focused && document.getElementById(focused)) document.getElementById(focused).focus();
}

// ---- asking the simulator ----

let asked = 0, timer = 0;
function ask() { clearTimeout(timer); timer = setTimeout(fetchRuns, 120); }
async function fetchRuns() {
  const number = ++asked;
  document.body.classList.add("busy");
  try {
    const response = await fetch("api/run", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(state.setting) });
    const found = await response.json();
    if (number !== asked) return;
    if (!response.ok) throw new Error(found.error);
    error.hidden = true;
    take(found);
  } catch (problem) {
    if (number === asked) { error.hidden = false; error.textContent = `That does not work: ${problem.message}`; document.body.dataset.answer = number; }
  } finally {
    if (number === asked) document.body.classList.remove("busy");
  }
}
function take(found) {
  found.runs.forEach((data, place) => { data.place = place; });
  state.runs = found.runs.filter((data) => !data.error).map((data) => new Run(data));
  state.failed = found.runs.filter((data) => data.error);
  state.workload = found.workload;
  const wanted = state.start === undefined ? firstLook() : state.start;
  state.x = Math.max(0, Math.min(span(), wanted));
  state.start = undefined;
  buildPanels();
  story.hidden = !state.runs.length;
  if (state.runs.length) drawStory();
  redraw();
  writeAddress();
  document.body.dataset.answer = asked;
}
function span() { return Math.max(1, ...state.runs.map((run) => run.span(state.axis))); }
function firstLook() { return Math.round(0.35 * Math.min(...state.runs.map((run) => run.span(state.axis)))); } // all are busy then

// ---- what is found ----

const story = el("section", { class: "box story", "aria-live": "polite" });
function drawStory() {
  const runs = state.runs, timed = !IS_FILE && state.setting.cost === "passes" ? false : true;
  const measure = (run) => (timed ? run.seconds : run.num), most = Math.max(...runs.map(measure));
  const best = runs.reduce((a, b) => (measure(b) < measure(a) ? b : a)), worst = runs.reduce((a, b) => (measure(b) > measure(a) ? b : a));
  const ratio = measure(worst) / measure(best), total = runs[0].requests.length;
  const headline = runs.length === 1 ? [el("em", {}, runs[0].label), ` answers ${count(total)} requests in ${count(runs[0].num)} passes, and uses ${percent(runs[0].totals.utilisation)} of its seats.`]
    : ratio < 1.005 ? [`The same ${count(total)} requests, and no difference in ${timed ? "time" : "passes"} between these systems.`]
    : timed ? [el("em", {}, best.label), ` serves ${count(total)} requests in ${duration(best.seconds)}. For the same requests ${worst.label} needs ${duration(worst.seconds)}, ${ratio.toFixed(2)} times as long.`]
    : [el("em", {}, best.label), ` serves ${count(total)} requests in ${count(best.num)} passes over the model. For the same requests ${worst.label} needs ${count(worst.num)}, ${ratio.toFixed(2)} times as many.`];
  const bars = runs.flatMap((run) => [
    el("div", { class: "name", title: run.label }, run.label),
    el("div", { class: "bar" }, el("i", { style: `width:${(62 * measure(run)) / most}%;--useful:${100 * run.totals.utilisation}%` }),
      el("span", {}, el("b", {}, `${count(run.num)} passes`), ` · ${percent(run.totals.utilisation)} useful · ${duration(run.seconds)}${run.refused ? ` · ${run.refused} refused` : ""}`)),
  ]);
  story.replaceChildren(el("h2", {}, ...headline), el("div", { class: "bars" }, ...bars, el("div", { class: "low" }, "Blue: the share of all seats, over all passes, that gave a token or read a prompt. The rest stood empty, paused or was padding.")));
}

// ---- panels ----

const grid = el("div", { class: "panels" });
function presetSelect(value, change) {
  const [name, ...knobs] = value.split(" ");
  const names = DATA.presets.map((preset) => preset.name);
  return el("select", { "aria-label": "Preset", onchange: (e) => change(e.target.value) },
    names.includes(name) && !knobs.length ? null : el("option", { value, selected: true }, value),
    ...DATA.presets.map((preset) => el("option", { value: preset.name, selected: preset.name === value, title: preset.system }, preset.name)));
}
function buildPanels() {
  const keep = !state.failed.length && !grid.querySelector(".failed") && panels.length === state.runs.length && panels.every((panel, i) => panel.run.label === state.runs[i].label);
  if (keep) { panels.forEach((panel, i) => panel.take(state.runs[i])); return; }
  panels.length = 0;
  for (const run of state.runs) panels.push(makePanel(run, run.place));
  grid.replaceChildren(...panels.map((panel) => panel.node), ...state.failed.map(failedPanel));
}
function presetHeader(run, place) {
  const change = (value) => { state.setting.presets = state.setting.presets.map((old, i) => (i === place ? value : old)); fetchRuns(); };
  const remove = el("button", { class: "plain icon", title: "Remove this system", "aria-label": `Remove ${run.label}`, onclick: () => { state.setting.presets = state.setting.presets.filter((_, i) => i !== place); fetchRuns(); } }, "✕");
  return el("header", {}, IS_FILE ? el("h3", {}, run.label) : presetSelect(run.label, change), el("span", { class: "system", title: run.card.system || "" }, run.card.system || ""), IS_FILE || state.runs.length + state.failed.length < 2 ? null : remove);
}
function failedPanel(run) {
  return el("section", { class: "box panel failed", "data-policy": run.policy }, presetHeader(run, run.place), el("p", { class: "why" }, el("b", {}, "Not with this setting: "), run.error, "."));
}
function tile(words) { const b = el("b", {}, "–"), small = el("small", {}, words); return { node: el("div", { class: "tile" }, b, small), set(value, note) { b.textContent = value; if (note) small.textContent = note; } }; }

function makePanel(run, place) {
  const tiles = { pass: tile("pass"), finished: tile("finished"), useful: tile("useful seats"), waiting: tile("waiting"), kv: tile("KV memory"), time: tile(DATA.clock || "simulated"), ttft: tile("TTFT p50 / p95") };
  for (const [name, one] of Object.entries(tiles)) one.node.dataset.tile = name;
  const overview = el("canvas", { class: "overview", role: "img" }), zoom = el("canvas", { class: "zoom", role: "img" });
  const chips = el("div", { class: "chips" }), reason = el("p", { class: "why" }), zoomCaption = el("span", {}), queueLabel = el("div", { class: "label" }, "Waiting");
  const details = el("details", {}, el("summary", {}, run.command ? "How it works, and this run on the command line" : "How it works"), el("dl", {}));
  const node = el("section", { class: "box panel", "data-policy": run.policy },
    presetHeader(run, place),
    el("div", { class: "tiles" }, ...Object.values(tiles).map((one) => one.node)),
    overview, el("div", { class: "caption" }, zoomCaption, el("span", {}, "a row is a seat, a column a pass")), zoom,
    el("div", { class: "line" }, queueLabel, chips), reason,
    run.card.short_waits ? el("p", { class: "short" }, el("b", {}, "Why a short request waits in this system: "), run.card.short_waits) : null, details);
  const panel = { run, node, windowed: [0, 0], cell: 14 };

  panel.take = (next) => {
    panel.run = next;
    const rows = [["Newcomers", "joins"], ["Prompts", "prefill"], ["Memory", "memory"], ["When short of it", "eviction"], ["Limits", "limits"]];
    details.querySelector("dl").replaceChildren(...rows.filter(([, key]) => next.card[key]).flatMap(([words, key]) => [el("dt", {}, words), el("dd", {}, next.card[key])]),
      ...(next.command ? [el("dt", {}, "The same run"), el("dd", {}, el("code", {}, next.command))] : []));
    const first = next.requests.find((row) => row[8]);
    tiles.finished.node.title = first ? `Refused: request ${first[0]}, ${first[8]}` : "";
  };
  panel.take(run);

  panel.draw = () => {
    const run = panel.run, k = run.stepAt(state.x, state.axis), step = Math.max(0, k - 1), done = k >= run.num && state.x >= run.span(state.axis) - 1e-6;
    panel.k = k;
    const view = { axis: state.axis, span: span(), x: state.x, k, hover: state.hover, mostWaiting: Math.max(...state.runs.map((one) => one.mostWaiting)) };
    drawOverview(overview, run, view);
    panel.windowed = drawZoom(zoom, run, view, panel.cell);
    tiles.pass.set(count(k), `of ${count(run.num)} passes`);
    tiles.finished.set(`${count(run.finished(k))}`, `of ${count(run.requests.length)} finished${run.refused ? `, ${run.refused} refused` : ""}`);
    tiles.useful.set(percent(k ? run.usefulUntil[k] / (run.seats * k) : null), "useful seats");
    const waiting = k && !done ? run.steps.waiting[step] : 0;
    tiles.waiting.set(count(waiting));
    tiles.kv.set(percent(k && !done ? run.steps.blocks[step] / run.mostBlocks : 0), run.preempted(k) ? `KV, ${count(run.preempted(k))} preempted` : "KV memory");
    tiles.time.set(duration(run.now(k)));
    tiles.ttft.set(run.ttft.p50 === null ? "–" : `${duration(1000 * run.ttft.p50)} / ${duration(1000 * run.ttft.p95)}`, "TTFT p50 / p95, all");
    zoomCaption.textContent = `Passes ${count(panel.windowed[0] + 1)} to ${count(panel.windowed[1])}`;
    overview.setAttribute("aria-label", `${run.label}: seats over passes, ${count(k)} of ${count(run.num)}`);
    zoom.setAttribute("aria-label", `${run.label}: seats around pass ${count(k)}`);
    const queue = done || !k ? [] : run.queueAt(step), code = run.steps.reason[step];
    queueLabel.textContent = `Waiting ${count(waiting)}`;
    const shown = queue.slice(0, 20), rest = waiting - shown.length;
    const names = shown.map((id) => {
      const request = run.request.get(id), again = run.evictions.some(([at, who]) => who === id && at <= step);
      return el("button", { class: `chip${state.hover === id ? " hot" : ""}${again ? " back" : ""}`, "data-request": id, title: again ? "was preempted" : null }, `#${id}`);
    });
    chips.replaceChildren(...names, ...(rest > 0 ? [el("span", { class: "chip more" }, `+ ${count(rest)}`)] : []), ...(waiting ? [] : [el("span", { class: "label" }, done ? "All is done." : "Nobody waits.")]));
    if (waiting) reason.replaceChildren(el("b", {}, `Why #${queue[0]} waits: `), why(run, step, queue[0]));
    else if (done) reason.replaceChildren(el("b", {}, "Done. "), `${count(run.num)} passes, ${percent(run.totals.utilisation)} of all seats useful, ${count(run.totals.preemptions)} preemptions.`);
    else reason.replaceChildren("Nobody waits just now.");
  };

  // pointing at things
  const at = (event, canvas, whole) => {
    const run = panel.run, box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top, rh = rowHeight(run.seats, whole);
    const step = whole ? Math.max(0, run.stepAt((x / box.width) * span() + (state.axis === "pass" ? 1 : 0), state.axis) - 1) : panel.windowed[0] + Math.floor(x / panel.cell);
    return { step, row: Math.floor(y / rh), inside: step < (whole ? run.num : panel.windowed[1]) && y >= 0, x: (x / box.width) * span() };
  };
  const hover = (whole) => (event) => {
    const run = panel.run, spot = at(event, event.currentTarget, whole);
    if (!spot.inside || spot.step >= run.num || (whole && spot.x > run.span(state.axis))) return leave();
    if (spot.row >= run.seats) { // the curves below the seats
      point(null);
      return showTip(event, [el("h4", {}, `Pass ${count(spot.step + 1)}`), facts([["Waiting", count(run.steps.waiting[spot.step])], ["KV blocks", `${count(run.steps.blocks[spot.step])} of ${count(run.mostBlocks)}`], ["Tokens", count(run.steps.tokens[spot.step])]])]);
    }
    const one = run.at(spot.row, spot.step);
    if (one && one.request >= 0) { point(one.request); showTip(event, describe(run, one.request, spot.step, one)); }
    else { point(null); showTip(event, emptySeat(run, spot.step, spot.row, one)); }
  };
  const leave = () => { point(null); hideTip(); };
  for (const [canvas, whole] of [[overview, true], [zoom, false]]) {
    canvas.addEventListener("pointermove", hover(whole));
    canvas.addEventListener("pointerleave", leave);
  }
  let dragging = false;
  const seek = (event) => { if (dragging) { stop(); go(at(event, overview, true).x); } };
  overview.addEventListener("pointerdown", (event) => { dragging = true; overview.setPointerCapture(event.pointerId); seek(event); });
  overview.addEventListener("pointermove", seek);
  for (const end of ["pointerup", "pointercancel"]) overview.addEventListener(end, () => { dragging = false; writeAddress(); });
  zoom.addEventListener("pointerdown", hover(false));
  overview.style.cursor = "ew-resize";
  chips.addEventListener("pointerover", (event) => { const id = event.target.dataset.request; if (id !== undefined) { point(Number(id)); showTip(event, describe(panel.run, Number(id), Math.max(0, panel.k - 1))); } });
  chips.addEventListener("pointerout", leave);
  chips.addEventListener("focusin", (event) => { const id = event.target.dataset.request; if (id !== undefined) { const box = event.target.getBoundingClientRect(); showTip({ clientX: box.left, clientY: box.bottom }, describe(panel.run, Number(id), Math.max(0, panel.k - 1))); } });
  chips.addEventListener("focusout", leave);
  return panel;
}
function point(request) { if (state.hover !== request) { state.hover = request; redraw(); } }

function describe(run, id, step, seat) {
  const r = run.request.get(id), queue = run.queueAt(step), behind = run.last.get(id) || 0;
  const waits = queue.includes(id) && !seat;
  const rows = [["Prompt, answer", `${count(r.prompt)}, ${count(r.output)} tokens`], ["Arrived", `at ${duration(r.arrival)}`]];
  rows.push(["Waited for a seat", r.admitted === null ? "never got one" : duration(r.admitted - r.arrival)]);
  rows.push(["First token (TTFT)", r.first === null ? "–" : `after ${duration(r.first - r.arrival)}`]);
  rows.push(["Told to its end", r.ended === null ? "–" : `at ${duration(r.ended)}, after ${duration(r.ended - r.arrival)}`]);
  if (r.preemptions) rows.push(["Preempted", r.preemptions === 1 ? "once" : `${r.preemptions} times`]);
  const short = r.output <= 32 ? " (short)" : "";
  const now = waits ? "waits" : seat ? KIND[seat.kind] : step >= behind ? "is done" : "";
  const words = waits ? why(run, step, id)
    : seat && seat.kind === HELD ? "It has a seat, and this pass computes others: in this system prompts and answers take turns, or the budget is spent."
    : seat && seat.kind === PREFILL ? `${count(seat.tokens)} prompt tokens in this pass.`
    : run.rule === "batch" && r.ended !== null && run.last.get(id) && run.xEnd(run.last.get(id), "time") < r.ended - 0.01 ? `Its last token is ready at ${duration(run.xEnd(run.last.get(id), "time"))}, and it is told when its whole batch ends.` : "";
  return [el("h4", {}, `#${id} ${now}${short}`), facts(rows), ...(words ? [el("p", {}, words)] : [])];
}
function emptySeat(run, step, row, one) {
  const waiting = run.steps.waiting[step];
  const words = one ? "This row is computed for nobody: the batch is a rectangle, and its member has finished."
    : run.rule === "batch" && run.seatsAt(step).some((seat) => seat) ? "Its request has finished, or the batch had no more members. Nobody may take this seat before the longest answer ends."
    : waiting ? `Empty, though ${count(waiting)} wait. ${why(run, step, run.queueAt(step)[0])}` : "Empty: nobody waits.";
  return [el("h4", {}, `Seat ${row + 1}, pass ${count(step + 1)}: ${one ? "padding" : "empty"}`), el("p", {}, words)];
}

// ---- playback ----

const slider = el("input", { type: "range", min: 0, max: 1000, step: "any", value: 0, "aria-label": "Position", oninput: (e) => { stop(); go(Number(e.target.value)); }, onchange: () => writeAddress() });
const position = el("span", { class: "pos" }), playButton = el("button", { class: "primary icon", title: "Play or pause (space)", "aria-label": "Play", onclick: () => toggle() }, "▶");
const speedButton = el("span", { class: "pos", style: "min-width:9ch;text-align:center" });
const axisSelect = el("select", { "aria-label": "Lockstep by", title: "What both pictures have in common: the number of passes, or simulated time", onchange: (e) => setAxis(e.target.value) }, el("option", { value: "pass" }, "by passes"), el("option", { value: "time" }, "by time"));
function go(x) { state.x = Math.max(0, Math.min(span(), x)); redraw(); }
function stepBy(n) {
  stop();
  if (state.axis === "pass") go(Math.round(state.x) + n);
  else { // to the next border of any run
    const moments = state.runs.map((run) => { const k = run.stepAt(state.x, "time") + n - (n < 0 ? 0 : 1); return n > 0 ? (k + 0 < run.num ? run.steps.start[Math.min(run.num - 1, Math.max(0, k))] : Infinity) : run.steps.start[Math.max(0, k - 1)]; });
    const next = n > 0 ? Math.min(...moments.filter((m) => m > state.x)) : Math.max(...moments.filter((m) => m < state.x));
    go(Number.isFinite(next) ? next : n > 0 ? span() : 0);
  }
  writeAddress();
}
let before = 0;
function toggle() {
  if (state.playing) { stop(); writeAddress(); return; }
  if (state.x >= span() - 1e-6 || state.untouched) state.x = 0;
  state.untouched = false;
  state.playing = true;
  playButton.textContent = "❚❚";
  playButton.setAttribute("aria-label", "Pause");
  before = performance.now();
  requestAnimationFrame(tick);
}
function stop() { state.untouched = false; state.playing = false; playButton.textContent = "▶"; playButton.setAttribute("aria-label", "Play"); }
function tick(now) {
  if (!state.playing) return;
  const unit = state.axis === "pass" ? 1 : Math.max(...state.runs.map((run) => run.seconds / Math.max(1, run.num)));
  state.x += (Math.min(100, now - before) / 1000) * SPEEDS[state.speed] * unit;
  before = now;
  if (state.x >= span()) { state.x = span(); stop(); writeAddress(); }
  redraw();
  requestAnimationFrame(tick);
}
function faster(n) { state.speed = Math.max(0, Math.min(SPEEDS.length - 1, state.speed + n)); redraw(); }
function setAxis(axis) {
  const share = state.runs.length ? state.runs[0].stepAt(state.x, state.axis) : 0, atEnd = state.x >= span();
  const reference = state.runs.find((run) => run.span(state.axis) >= state.x) || state.runs[0];
  const k = reference.stepAt(state.x, state.axis);
  state.axis = axis;
  state.x = atEnd ? span() : axis === "pass" ? k : reference.now(k);
  redraw();
  writeAddress();
}

let pending = false;
function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    if (!state.runs.length) return;
    slider.max = span();
    slider.value = state.x;
    axisSelect.value = state.axis;
    position.textContent = state.axis === "pass" ? `pass ${count(state.x)}` : duration(state.x);
    speedButton.textContent = `${SPEEDS[state.speed]} passes/s`;
    for (const panel of panels) panel.draw();
    document.body.dataset.x = Math.round(state.x);
  });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const kind = event.target.tagName, typing = kind === "SELECT" || (kind === "INPUT" && event.target.type !== "range");
  if (typing || (kind === "INPUT" && event.target !== slider && event.key.startsWith("Arrow"))) return;
  const act = { " ": () => toggle(), ArrowRight: () => stepBy(event.shiftKey ? 10 : 1), ArrowLeft: () => stepBy(event.shiftKey ? -10 : -1), "+": () => faster(1), "=": () => faster(1), "-": () => faster(-1),
    Home: () => { stop(); go(0); writeAddress(); }, End: () => { stop(); go(span()); writeAddress(); }, Escape: () => hideTip() }[event.key];
  if (!act || (event.key === " " && kind === "BUTTON" && event.target !== playButton) || (event.key === " " && kind === "SUMMARY")) return;
  event.preventDefault();
  act();
});

// ---- the page ----

const error = el("div", { class: "error", role: "alert", hidden: true });
function start() {
  startTheme();
  readAddress();
  state.untouched = true;
  const share = el("button", { class: "plain", title: "Copy a link to exactly this", onclick: async (e) => { const button = e.currentTarget; writeAddress(); await navigator.clipboard.writeText(location.href); button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy link"; }, 1500); } }, "Copy link");
  const reset = el("button", { class: "plain", title: "Back to the first view", onclick: () => { state.setting = { ...DATA.default }; state.start = undefined; state.untouched = true; drawControls(); fetchRuns(); } }, "Reset");
  const add = el("button", { class: "plain", title: "One more preset beside these", onclick: () => {
    const free = DATA.presets.map((preset) => preset.name).filter((name) => !state.setting.presets.includes(name));
    const next = ["vllm-v0", "orca", "sarathi", "tgi"].find((name) => free.includes(name)) || free[0];
    if (next && state.setting.presets.length < DATA.most.presets) { state.setting.presets = [...state.setting.presets, next]; fetchRuns(); } } }, "+ Add a system");
  const top = el("div", { class: "top" }, el("h1", {}, el("b", {}, "hopon"), " lab"), el("p", {}, IS_FILE ? DATA.workload : "The same requests through several batching systems, pass by pass."),
    ...(IS_FILE ? [] : [add, share, reset]), themeButton(redraw));
  const transport = el("div", { class: "box transport" }, playButton,
    el("button", { class: "icon", title: "A pass back (left arrow)", "aria-label": "A pass back", onclick: () => stepBy(-1) }, "◂"), el("button", { class: "icon", title: "A pass on (right arrow)", "aria-label": "A pass on", onclick: () => stepBy(1) }, "▸"),
    el("span", { class: "scrub" }, slider), position, axisSelect,
    el("span", { class: "group" }, el("button", { class: "icon", title: "Slower (-)", "aria-label": "Slower", onclick: () => faster(-1) }, "−"), speedButton, el("button", { class: "icon", title: "Faster (+)", "aria-label": "Faster", onclick: () => faster(1) }, "+")), legend());
  const controls = IS_FILE ? null : el("details", { class: "box controls", open: innerWidth > 900 }, el("summary", {}, "Settings"), fields);
  const keys = el("footer", {}, el("kbd", {}, "space"), " play or pause  ", el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " a pass back or on (with shift: ten)  ", el("kbd", {}, "+"), " ", el("kbd", {}, "−"), " faster, slower  ", el("kbd", {}, "Home"), " ", el("kbd", {}, "End"),
    IS_FILE ? "" : ". Everything is computed by hopon’s own scheduler on a virtual clock; the address bar holds the whole setting.");
  document.getElementById("app").append(top, el("div", { class: `layout${IS_FILE ? " single" : ""}` }, ...(controls ? [controls] : []), el("main", { class: "main" }, error, story, transport, grid)), keys, tip);
  new ResizeObserver(redraw).observe(grid);
  if (IS_FILE) take(DATA);
  else { drawControls(); fetchRuns(); }
  addEventListener("hashchange", () => { if (!IS_FILE) { state.setting = { ...DATA.default }; readAddress(); drawControls(); fetchRuns(); } });
}
start();
