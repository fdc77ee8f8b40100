"use strict";
(() => {
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") element.textContent = value;
    else if (key === "run") element.style.setProperty("--run", `var(--run-${value % 6})`);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
};
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = () => document.documentElement.dataset.theme === "dark";
const count = data.runs.length;

/* What is being looked at; everything below draws from it. */
const at = { clip: 0, view: "side", left: 0, right: Math.min(1, count - 1), frame: 0, hover: null,
  playing: false, rate: 1, run: -1, branch: -1, layer: 0, step: -1, head: 0, plan: 0 };
const clip = () => data.clips[at.clip];

/* ---- a line of buttons of which one is chosen, as the keyboard expects it ---- */
function segments(box, onChoose) {
  box.addEventListener("click", event => {
    const button = event.target.closest("[role=radio]");
    if (button) onChoose(button);
  });
  box.addEventListener("keydown", event => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const all = [...box.querySelectorAll("[role=radio]")];
    if (!move || !all.length) return;
    event.preventDefault();
    event.stopPropagation();
    const next = all[(all.indexOf(document.activeElement) + move + all.length) % all.length];
    onChoose(next);
    (all.includes(next) && next.isConnected ? next : box.querySelector("[aria-checked=true]")).focus();
  });
}
function check(box, isChosen) {
  for (const button of box.querySelectorAll("[role=radio]")) {
    const chosen = isChosen(button);
    button.setAttribute("aria-checked", chosen);
    button.tabIndex = chosen ? 0 : -1;
  }
}

/* ---- the tip that follows the pointer ---- */
const tip = $("tip");
function showTip(text, event) {
  if (!text) { tip.hidden = true; return; }
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${clamp(event.clientX + 14, 4, innerWidth - box.width - 4)}px`;
  // Below the pointer; above a finger, which would hide it.
  const above = event.pointerType === "touch" ? event.clientY > box.height + 28 : event.clientY + 18 + box.height > innerHeight;
  tip.style.top = `${above ? event.clientY - box.height - (event.pointerType === "touch" ? 24 : 10) : event.clientY + 18}px`;
}
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
addEventListener("pointerdown", () => { tip.hidden = true; }, { capture: true });
/* What a pointer over an element asks for, a finger asks for by a tap; that answer stays. */
function answer(element, textAt) {
  for (const kind of ["pointermove", "pointerdown"]) element.addEventListener(kind, event => showTip(textAt(event), event));
  element.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") showTip("", event); });
}

/* ---- films: decoded from the page when they are first watched ---- */
const urls = new Map();
function filmUrl(index, run, kind = "film") {
  const key = `${kind}-${index}-${run}`;
  if (!urls.has(key)) {
    const [head, body] = $(key).textContent.split(",", 2);
    const bytes = Uint8Array.from(atob(body), c => c.charCodeAt(0));
    urls.set(key, URL.createObjectURL(new Blob([bytes], { type: head.slice(5).split(";")[0] })));
  }
  return urls.get(key);
}

/* ---- the stage ---- */
const stage = $("stage");
const figures = data.runs.map((name, run) => {
  const video = make("video", { muted: true, playsinline: true, preload: "auto", "aria-label": `Clip of ${name}` });
  video.muted = true;
  const value = make("span", { class: "value" });
  const caption = make("figcaption", {}, make("span", { class: "swatch", run }), make("span", { class: "who", text: name }), value);
  const figure = make("figure", {}, video, caption);
  stage.append(figure);
  return { figure, video, value };
});
const videos = figures.map(each => each.video);
/* Its film is never seen itself: it is drawn, as bright as asked. */
const apart = make("video", { muted: true, playsinline: true, preload: "auto" });
apart.muted = true;
const difference = make("canvas", { role: "img", "aria-label": "Difference from the reference" });
const differenceValue = make("span", { class: "value" });
stage.append(make("figure", { class: "canvas" }, difference,
  make("figcaption", {}, make("span", { class: "who", text: "difference" }), differenceValue)));
const wipe = make("input", { type: "range", min: 0, max: 1000, value: 500, id: "wipe", "aria-label": "Wipe between left and right" });
stage.append(make("div", { class: "wipe" }, wipe, make("i")));
wipe.addEventListener("input", () => stage.style.setProperty("--wipe", `${wipe.value / 10}%`));
wipe.addEventListener("keydown", event => {
  const move = { ArrowLeft: -20, ArrowRight: 20 }[event.key];
  if (!move) return;
  event.preventDefault();
  wipe.value = +wipe.value + move;
  wipe.dispatchEvent(new Event("input"));
});

const shown = () => at.view === "side" ? videos.map((_, run) => run) : [at.left, at.right];
const films = () => at.view === "difference" ? [...videos, apart] : videos;
function arrange() {
  const against = at.view === "difference";
  if (against && at.left) Object.assign(at, { left: 0, right: at.right || at.left });
  for (const side of ["left", "right"]) $(side).value = at[side];
  $("left-label").hidden = $("right").options[0].disabled = against;
  stage.dataset.view = at.view;
  $("pair").hidden = at.view === "side";
  $("gain-label").hidden = at.view !== "difference";
  check($("views"), button => button.dataset.view === at.view);
  figures.forEach(({ figure }, run) => {
    figure.classList.toggle("unused", !shown().includes(run));
    figure.classList.toggle("left-side", at.view !== "side" && run === at.left);
    figure.classList.toggle("right-side", at.view !== "side" && run === at.right);
  });
  loadDifference();
}
async function loadDifference() {
  if (at.view !== "difference") return apart.pause();
  const key = `${at.clip}-${at.right}`;
  if (apart.dataset.key !== key) {
    apart.dataset.key = key;
    const loaded = new Promise(done => { for (const event of ["loadeddata", "error"]) apart.addEventListener(event, done, { once: true }); });
    apart.src = filmUrl(at.clip, at.right, "difference");
    await loaded;
  }
  if (at.playing) await align();
  else apart.currentTime = middle(count, at.frame);
  drawDifference();
}
function choosePair(side, run) {
  const other = side === "left" ? "right" : "left";
  if (at[other] === run) at[other] = at[side];
  at[side] = run;
  arrange();
}
for (const side of ["left", "right"]) {
  $(side).append(...data.runs.map((name, run) => make("option", { value: run, text: name })));
  $(side).addEventListener("change", () => choosePair(side, +$(side).value));
}
segments($("views"), button => {
  at.view = button.dataset.view;
  arrange();
  if (at.view !== "side") document.querySelector(".player").scrollIntoView({ block: "nearest" });
});

const brush = difference.getContext("2d", { willReadFrequently: true });
function drawDifference() {
  if (at.view !== "difference") return;
  const { width, height } = clip();
  if (difference.width !== width) difference.width = width;
  if (difference.height !== height) difference.height = height;
  if (apart.readyState < 2) return;
  brush.drawImage(apart, 0, 0, width, height);
  const picture = brush.getImageData(0, 0, width, height), pixels = picture.data;
  const gain = +$("gain").value, { means, lossy } = clip().runs[at.right].difference;
  // The film holds square roots.
  for (let i = 0; i < pixels.length; i += 4) pixels[i] = pixels[i + 1] = pixels[i + 2] = pixels[i + 1] ** 2 / 255 * gain;
  brush.putImageData(picture, 0, 0);
  difference.dataset.frame = Math.floor(apart.currentTime * fps(count));
  differenceValue.textContent = `mean ${means[at.frame].toFixed(2)} of 255${lossy ? ", codec included" : ""}`;
}
$("gain").addEventListener("input", () => { $("gain-value").textContent = `×${$("gain").value}`; drawDifference(); });
for (const event of ["seeked", "loadeddata"]) apart.addEventListener(event, drawDifference);

/* ---- one time line for all films. The first leads; the others keep step with it. ---- */
const fps = run => clip().runs[run % count].fps;  // the difference has the pace of the reference
const middle = (run, frame) => (frame + 0.5) / fps(run);
const seekAll = frame => Promise.all(films().map((video, run) => new Promise(done => {
  if (video.readyState < 1) return done();
  video.addEventListener("seeked", done, { once: true });
  video.currentTime = middle(run, frame);
})));
function go(frame) {
  pause();
  at.frame = clamp(Math.round(frame), 0, clip().frames - 1);
  seekAll(at.frame);
  drawTime();
}
/* Browsers refuse rates outside of these bounds. */
const pace = (run, factor = 1) => clamp(at.rate * factor * fps(run) / fps(0), 0.0625, 16);
async function play() {
  if (at.playing) return;
  at.playing = true;
  drawPlay();
  if (at.frame >= clip().frames - 1) at.frame = 0;
  await align();
  requestAnimationFrame(follow);
}
function pause() {
  if (!at.playing) return;
  at.playing = false;
  for (const video of films()) video.pause();
  drawPlay();
}
async function follow() {
  if (!at.playing) return;
  const position = videos[0].currentTime * fps(0);
  const ahead = films().map((video, run) => video.currentTime * fps(run) - position);
  const over = videos[0].ended || position >= clip().frames - 0.05;
  at.frame = over ? 0 : clamp(Math.floor(position), 0, clip().frames - 1);
  if (over || (performance.now() - aligned > 400 && ahead.some(frames => Math.abs(frames) > 0.75))) {
    await align();
  } else {
    // Small differences are made up for by playing a little faster or slower.
    films().forEach((video, run) => {
      video.playbackRate = pace(run, Math.abs(ahead[run]) > 0.1 ? clamp(1 - ahead[run] * 0.5, 0.5, 2) : 1);
    });
  }
  drawTime();
  drawDifference();
  requestAnimationFrame(follow);
}
/* One that cannot keep up stops the others too: better to stutter than to compare unlike frames. */
let aligned = 0;
async function align() {
  for (const video of films()) video.pause();
  await seekAll(at.frame);
  if (!at.playing) return;
  films().forEach((video, run) => { video.playbackRate = pace(run); });
  await Promise.allSettled(films().map(video => video.play()));
  aligned = performance.now();
}
const PLAY = "M4 2.5v11l9.5-5.5z", PAUSE = "M3.5 2.5h3v11h-3zM9.5 2.5h3v11h-3z";
function drawPlay() {
  $("play").setAttribute("aria-label", at.playing ? "Pause" : "Play");
  $("play").querySelector("path").setAttribute("d", at.playing ? PAUSE : PLAY);
}
const time = $("time");
function drawTime() {
  const last = clip().frames - 1;
  time.value = at.frame;
  time.style.setProperty("--at", last ? at.frame / last : 0);
  time.setAttribute("aria-valuetext", `frame ${at.frame + 1} of ${clip().frames}`);
  $("clock").replaceChildren(make("span", { class: "wide", text: "frame " }), `${at.frame + 1} / ${clip().frames}`, make("span", { class: "wide", text: ` · ${(at.frame / fps(0)).toFixed(2)} s` }));
  drawCursors();
  markLatent();
}
time.addEventListener("input", () => go(+time.value));
$("play").addEventListener("click", () => at.playing ? pause() : play());
$("back").addEventListener("click", () => go(at.frame - 1));
$("forward").addEventListener("click", () => go(at.frame + 1));
$("speed").addEventListener("change", () => {
  at.rate = +$("speed").value;
  videos.forEach((video, run) => { video.playbackRate = pace(run); });
});
document.addEventListener("visibilitychange", () => { if (document.hidden) pause(); });

/* ---- curves under the time line ---- */
const readable = (metric, value) => value === "inf" ? "∞" : value == null ? "–"
  : value.toFixed(metric.digits);
const withUnit = (metric, value) => {
  const unit = metric.title.split(", ")[1];
  return unit && Number.isFinite(value) ? `${readable(metric, value)} ${unit}` : readable(metric, value);
};
let curves = [];
function drawCurves() {
  $("curves").replaceChildren();
  curves = [];
  const frames = clip().frames;
  for (const metric of data.metrics) {
    const lines = clip().runs.map((run, index) => ({ run: index, values: run.curves[metric.id] || [] })).filter(line => line.values.length);
    if (!lines.length) continue;
    const finite = lines.flatMap(line => line.values).filter(Number.isFinite);
    let low = Math.min(...finite), high = Math.max(...finite);
    if (!finite.length) { low = 0; high = 1; }
    const room = (high - low || Math.abs(high) * 0.02 || 1) * 0.08;
    const x = frame => frames > 1 ? frame / (frames - 1) * 100 : 50;
    const y = value => 100 - (value - low + room) / (high - low + 2 * room) * 100;
    const paths = lines.map(({ run, values }) => {
      let pen = "M", path = "";
      values.forEach((value, frame) => {
        if (!Number.isFinite(value)) { pen = "M"; return; }
        path += `${pen}${x(frame).toFixed(2)} ${y(value).toFixed(2)}`;
        pen = "L";
      });
      return `<path d="${path}" stroke="var(--run-${run % 6})"/>`;
    });
    const box = make("div", { class: "curve-box", role: "img", "aria-label": `${metric.title} per frame, from ${readable(metric, low)} to ${readable(metric, high)}` });
    box.innerHTML = `<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true"><line x1="0" x2="100" y1="${y(high)}" y2="${y(high)}"/><line x1="0" x2="100" y1="${y(low)}" y2="${y(low)}"/>${paths.join("")}</svg>`;
    for (const end of finite.length ? new Set([high, low]) : []) box.append(make("span", { style: `top:${y(end)}%`, text: readable(metric, end) }));
    const cursor = make("i"), ghost = make("i", { class: "hover", hidden: true });
    box.append(ghost, cursor);
    const output = make("output");
    const frameAt = event => {
      const area = box.getBoundingClientRect();
      return clamp(Math.round((event.clientX - area.left) / area.width * (frames - 1)), 0, frames - 1);
    };
    box.addEventListener("pointermove", event => {
      at.hover = frameAt(event);
      if (event.buttons & 1) go(at.hover);
      drawCursors();
    });
    box.addEventListener("pointerleave", () => { at.hover = null; drawCursors(); });
    box.addEventListener("pointerdown", event => go(frameAt(event)));
    $("curves").append(make("div", { class: "curve" },
      make("div", { class: "curve-head" }, make("b", { text: metric.title }), make("small", { text: metric.higher == null ? "" : metric.higher ? "higher is better" : "lower is better" }), output), box));
    curves.push({ metric, lines, cursor, ghost, output });
  }
}
function drawCursors() {
  const last = Math.max(clip().frames - 1, 1), frame = at.hover ?? at.frame;
  for (const { metric, lines, cursor, ghost, output } of curves) {
    cursor.style.left = `${at.frame / last * 100}%`;
    ghost.hidden = at.hover == null;
    ghost.style.left = `${frame / last * 100}%`;
    output.replaceChildren(...lines.map(({ run, values }) => make("span", { run, text: readable(metric, values[frame]), title: data.runs[run] })));
  }
  const first = data.metrics[0];
  figures.forEach(({ value }, run) => {
    const values = first && clip().runs[run].curves[first.id];
    value.textContent = values && values.length ? withUnit(first, values[at.frame]) : run ? "" : "reference";
  });
}

/* ---- which clip ---- */
$("clip").append(...data.clips.map((each, index) => make("option", { value: index, text: each.prompt ? `${index + 1}. ${each.prompt}` : each.name })));
async function chooseClip(index) {
  pause();
  at.clip = (index + data.clips.length) % data.clips.length;
  at.frame = 0;
  at.hover = null;
  $("clip").value = at.clip;
  $("clip-name").textContent = `Clip ${at.clip + 1} of ${data.clips.length} ▾`;
  $("prompt-text").textContent = clip().prompt || clip().name;
  stage.style.setProperty("--aspect", `${clip().width} / ${clip().height}`);
  stage.style.setProperty("--ratio", clip().width / clip().height);
  time.max = clip().frames - 1;
  const ready = videos.map((video, run) => new Promise(done => {
    for (const event of ["loadeddata", "error"]) video.addEventListener(event, done, { once: true });
    video.src = filmUrl(at.clip, run);
  }));
  drawCurves();
  drawSites();
  drawTime();
  await Promise.all([...ready, loadDifference()]);
  await seekAll(at.frame);
  document.body.dataset.ready = at.clip;
}
$("clip").addEventListener("change", () => chooseClip(+$("clip").value));
$("previous").addEventListener("click", () => chooseClip(at.clip - 1));
$("next").addEventListener("click", () => chooseClip(at.clip + 1));
document.addEventListener("click", event => {
  const link = event.target.closest("[data-clip]");
  if (!link) return;
  chooseClip(+link.dataset.clip);
  $("watch").scrollIntoView({ block: "start" });
});

/* ---- cost: layer × head of one step or, as step -1, of all that ran sparse; and layer × step ---- */
const STOPS = {
  light: [[238, 244, 240], [158, 208, 197], [62, 154, 151], [20, 92, 112], [12, 42, 70]],
  dark: [[30, 36, 46], [28, 74, 92], [40, 136, 138], [118, 192, 172], [206, 224, 190]],
};
function shade(value) {
  const stops = STOPS[dark() ? "dark" : "light"], place = clamp(value, 0, 1) * (stops.length - 1);
  const i = Math.min(Math.floor(place), stops.length - 2), part = place - i;
  return `rgb(${stops[i].map((from, c) => Math.round(from + (stops[i + 1][c] - from) * part)).join(" ")})`;
}
const sites = () => clip().runs[at.run]?.sites;
const withSites = () => clip().runs.map((run, index) => run.sites && run.sites.rows.length ? index : -1).filter(index => index >= 0);
const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
// Calls count by the work they would be densely.
const meanCost = (rows, cost) => rows.reduce((sum, row) => sum + row.weight * cost(row), 0) / (rows.reduce((sum, row) => sum + row.weight, 0) || 1);
let cells = new Map();
const rowsAt = (layer, step) => cells.get(layer * 4096 + step) || [];
const stepName = step => step < 0 ? "all sparse steps" : `step ${step}`;
function site(layer, step) {
  const rows = rowsAt(layer, step);
  if (!rows.length) return null;
  const headed = rows.filter(row => row[6].length);
  const heads = headed.length ? headed[0][6].map((_, head) => meanCost(headed, row => row[6][head])) : [];
  return { cost: meanCost(rows, row => row[3]), heads,
    reasons: [...new Set(rows.filter(row => row[4] >= 0).map(row => sites().reasons[row[4]]))],
    backends: [...new Set(rows.map(row => sites().backends[row[5]]))], dense: rows.every(row => row[4] >= 0) };
}
function drawSites() {
  const able = withSites();
  $("costs").hidden = !able.length;
  if (!able.length) return;
  const sparse = run => clip().runs[run].sites.rows.some(row => row[4] < 0);
  if (!able.includes(at.run)) at.run = able.find(sparse) ?? able[0];
  $("site-runs").replaceChildren(...able.map(run => make("button", { type: "button", role: "radio", "data-run": run }, make("span", { class: "swatch", run }), data.runs[run])));
  check($("site-runs"), button => +button.dataset.run === at.run);
  const names = sites().branches;
  if (at.branch >= names.length) at.branch = -1;
  $("branch").replaceChildren(make("option", { value: -1, text: "all" }), ...names.map((name, index) => make("option", { value: index, text: name })));
  $("branch").value = at.branch;
  $("branch").parentElement.hidden = names.length < 2;
  $("step").replaceChildren(make("option", { value: -1, text: stepName(-1) }), ...Array.from({ length: sites().steps }, (_, step) => make("option", { value: step, text: step })));
  cells = new Map();
  const put = (row, step) => {
    const key = row[0] * 4096 + step;
    cells.get(key)?.push(row) ?? cells.set(key, [row]);
  };
  sites().rows.forEach((row, i) => { row.weight = sites().weights[i]; });
  const rows = sites().rows.filter(row => at.branch < 0 || row[2] === at.branch);
  const sparseLayers = new Set(rows.filter(row => row[4] < 0).map(row => row[0]));
  for (const row of rows) {
    put(row, row[1]);
    if (row[4] < 0 || !sparseLayers.has(row[0])) put(row, -1);
  }
  at.layer = Math.min(at.layer, sites().layers - 1);
  at.step = Math.min(at.step, sites().steps - 1);
  at.head = Math.min(at.head, sites().heads - 1);
  const plan = sites().plans[0];
  if (plan && !rowsAt(at.layer, at.step).some(row => row[4] < 0)) { at.layer = plan.layer; at.step = -1; at.head = plan.head; }
  drawMaps();
  drawHeads();
  drawPlans();
}
const MARGIN = { left: 26, bottom: 20 };
function heatmap(canvas, columns, valueAt, chosen, marked) {
  const layers = sites().layers, width = canvas.parentElement.clientWidth;
  const height = clamp(layers * 26, 120, 420) + MARGIN.bottom, density = devicePixelRatio || 1;
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(density, density);
  const w = (width - MARGIN.left) / columns, h = (height - MARGIN.bottom) / layers;
  const gap = Math.min(w, h) > 7 ? 1 : 0;
  for (let layer = 0; layer < layers; layer++) for (let column = 0; column < columns; column++) {
    const found = valueAt(layer, column);
    if (!found) continue;
    const x = MARGIN.left + column * w, y = layer * h;
    context.fillStyle = shade(found.value);
    context.fillRect(x, y, w - gap, h - gap);
    if (found.dense) {
      context.save();
      context.beginPath();
      context.rect(x, y, w - gap, h - gap);
      context.clip();
      context.strokeStyle = dark() ? "rgb(20 26 34 / .45)" : "rgb(255 255 255 / .32)";
      context.lineWidth = 1;
      context.beginPath();
      for (let d = -h; d < w; d += 5) { context.moveTo(x + d, y + h); context.lineTo(x + d + h, y); }
      context.stroke();
      context.restore();
    }
    if (marked(layer, column)) {
      context.fillStyle = found.value > 0.5 !== dark() ? "#fff" : "#12161d";
      context.beginPath();
      context.arc(x + w / 2, y + h / 2, Math.min(3, w / 4), 0, 7);
      context.fill();
    }
  }
  context.strokeStyle = css("--run-2");
  context.lineWidth = 2;
  if (chosen[1] >= 0) context.strokeRect(MARGIN.left + chosen[1] * w - 0.5, chosen[0] * h - 0.5, w - gap + 1, h - gap + 1);
  context.fillStyle = css("--muted");
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  const every = Math.ceil(14 / h), across = Math.ceil(22 / w);
  for (let layer = 0; layer < layers; layer += every) context.fillText(layer, MARGIN.left - 6, (layer + 0.5) * h);
  context.textAlign = "center";
  for (let column = 0; column < columns; column += across) context.fillText(column, MARGIN.left + (column + 0.5) * w, height - 8);
  canvas.cellAt = event => {
    const area = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - area.left - MARGIN.left) / w), layer = Math.floor((event.clientY - area.top) / h);
    return column >= 0 && column < columns && layer >= 0 && layer < layers ? [layer, column] : null;
  };
}
const ofSite = (plan, layer, step) => plan.layer === layer && (step < 0 || plan.step === step);
const hasPlan = (layer, step, head) => sites().plans.some(plan => ofSite(plan, layer, step) && (head == null || plan.head === head));
function drawMaps() {
  heatmap($("map-steps"), sites().steps, (layer, step) => { const s = site(layer, step); return s && { value: s.cost, dense: s.dense }; }, [at.layer, at.step], (layer, step) => hasPlan(layer, step));
  heatmap($("map-heads"), sites().heads, (layer, head) => { const s = site(layer, at.step); return s && s.heads.length > head ? { value: s.heads[head], dense: s.dense } : null; }, [at.layer, at.head], (layer, head) => hasPlan(layer, at.step, head));
  const name = data.runs[at.run];
  $("map-steps").setAttribute("aria-label", `Cost by layer and step of ${name}; arrow keys choose`);
  $("map-heads").setAttribute("aria-label", `Cost by layer and head of ${name}, ${stepName(at.step)}; arrow keys choose`);
  $("map-step-name").textContent = stepName(at.step);
  $("step").value = at.step;
  const scale = $("scale").getContext("2d");
  for (let i = 0; i < 256; i++) { scale.fillStyle = shade(i / 255); scale.fillRect(i, 0, 1, 10); }
  const s = site(at.layer, at.step);
  const said = $("site");
  const where = `layer ${at.layer}, ${stepName(at.step)}`;
  if (!s) { said.textContent = `${where}: no call`; return; }
  const range = s.heads.length ? `, heads ${Math.min(...s.heads).toFixed(2)} to ${Math.max(...s.heads).toFixed(2)}, head ${at.head}: ${s.heads[at.head].toFixed(3)}` : "";
  said.replaceChildren(make("b", { text: `${where}: cost ${s.cost.toFixed(3)}` }), `${range} `,
    make("small", { text: `${s.backends.join(", ")}${s.reasons.length ? `; dense: ${s.reasons.join(", ")}` : ""}` }));
}
function chooseSite(change) {
  Object.assign(at, change);
  at.layer = clamp(at.layer, 0, sites().layers - 1);
  at.step = clamp(at.step, -1, sites().steps - 1);
  at.head = clamp(at.head, 0, sites().heads - 1);
  drawMaps();
  const fits = plan => ofSite(plan, at.layer, at.step);
  let plan = sites().plans.findIndex(each => fits(each) && each.head === at.head);
  if (plan < 0) plan = sites().plans.findIndex(fits);
  if (plan >= 0 && plan !== at.plan) { at.plan = plan; drawPlans(); }
}
for (const [id, key] of [["map-steps", "step"], ["map-heads", "head"]]) {
  const canvas = $(id);
  answer(canvas, event => {
    const cell = canvas.cellAt?.(event), step = key === "step" ? cell?.[1] : at.step;
    const s = cell && site(cell[0], step);
    const value = s && (key === "step" ? s.cost : s.heads[cell[1]]);
    if (value == null) return "";
    const when = key === "step" ? "" : `, ${stepName(step)}`, why = s.reasons.length ? `\ndense: ${s.reasons.join(", ")}` : "";
    const planned = hasPlan(cell[0], step, key === "step" ? null : cell[1]) ? "\nits plan is below" : "";
    return `layer ${cell[0]}, ${key} ${cell[1]}${when}\ncost ${value.toFixed(3)}${why}${planned}`;
  });
  canvas.addEventListener("click", event => {
    const cell = canvas.cellAt?.(event);
    if (cell) chooseSite({ layer: cell[0], [key]: cell[1] });
  });
  canvas.addEventListener("keydown", event => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    chooseSite({ layer: at.layer + move[0], [key]: at[key] + move[1] });
  });
}
segments($("site-runs"), button => { at.run = +button.dataset.run; at.plan = 0; drawSites(); });
$("branch").addEventListener("change", () => { at.branch = +$("branch").value; drawSites(); });
$("step").addEventListener("change", () => chooseSite({ step: +$("step").value }));

/* ---- what each head was given ---- */
function drawHeads() {
  const { layers, heads } = sites(), given = new Map();
  for (const [layer, , branch, , reason, , shares] of sites().rows) {
    if (reason >= 0 || (at.branch >= 0 && branch !== at.branch)) continue;
    shares.forEach((share, head) => {
      const key = layer * 4096 + head;
      given.get(key)?.push(share) ?? given.set(key, [share]);
    });
  }
  $("heads").hidden = !given.size;
  if (!given.size) return;
  const asked = clip().runs[at.run].budget, top = Math.max(asked || 0, ...[...given.values()].flat());
  const high = Math.min(1, Math.ceil(top * 10 + 0.5) / 10);
  // In the page's own pixels, so that words keep their size; what is asked is said beside its line.
  const W = $("head-plot").clientWidth, H = 290, left = 30, right = asked == null ? 0 : 66, bottom = 42;
  const wide = (W - left - right) / layers;
  const x = (layer, head) => left + wide * (layer + 0.5 + (heads > 1 ? (head / (heads - 1) - 0.5) * 0.62 : 0));
  const y = value => 8 + (H - bottom - 8) * (1 - value / high);
  const parts = [];
  for (let tick = 0; tick <= high + 1e-9; tick += high > 0.6 ? 0.2 : 0.1) parts.push(`<line class="grid" x1="${left}" x2="${W - right}" y1="${y(tick)}" y2="${y(tick)}"/><text x="${left - 6}" y="${y(tick) + 4}" text-anchor="end">${tick.toFixed(1)}</text>`);
  const every = Math.ceil(24 / wide);
  for (let layer = 0; layer < layers; layer += every) parts.push(`<text x="${x(layer, (heads - 1) / 2)}" y="${H - bottom + 16}" text-anchor="middle">${layer}</text>`);
  parts.push(`<text x="${left + wide * layers / 2}" y="${H - 8}" text-anchor="middle">layer</text>`);
  if (asked != null) parts.push(`<line class="asked" x1="${left}" x2="${W - right}" y1="${y(asked)}" y2="${y(asked)}"/><text x="${W - right + 6}" y="${y(asked) + 4}" text-anchor="start">asked ${asked}</text>`);
  const colour = `var(--run-${at.run % 6})`, slot = wide / heads * 0.62, radius = clamp(slot * 0.45, 2.2, 5);
  for (const [key, values] of given) {
    const layer = Math.floor(key / 4096), head = key % 4096, px = x(layer, head), middle = mean(values);
    const said = `layer ${layer}, head ${head}\nmean ${middle.toFixed(3)}, from ${Math.min(...values).toFixed(3)} to ${Math.max(...values).toFixed(3)}`;
    parts.push(`<g data-tip="${said}"><line class="range" stroke="${colour}" x1="${px}" x2="${px}" y1="${y(Math.min(...values))}" y2="${y(Math.max(...values))}"/><circle cx="${px}" cy="${y(middle)}" r="${radius}" fill="${colour}"/><circle cx="${px}" cy="${y(middle)}" r="9" fill="transparent" stroke="none"/></g>`);
  }
  $("head-plot").innerHTML = `<svg viewBox="0 0 ${W} ${H}" class="${slot < 6 ? "crowded" : ""}" role="img" aria-label="Mean cost of each head by layer">${parts.join("")}</svg>`;
}
answer($("head-plot"), event => event.target.closest("[data-tip]")?.dataset.tip);

/* ---- plans over the frames they attend to ---- */
const TINTS = { 0: "rgb(9 11 16 / .8)", 2: "rgb(36 190 160 / .34)", 4: "rgb(52 110 232 / .44)", 8: "rgb(118 60 190 / .52)", 254: "rgb(120 70 60 / .66)" };
const WORDS = { 0: "not read", 1: "read", 2: "read as means of 2", 4: "read as means of 4", 8: "read as means of 8", 254: "read as one mean a block" };
const stills = new Map();
async function stillsOf(index, run, frames) {
  const key = `${index}-${run}-${frames.join()}`;
  if (!stills.has(key)) {
    stills.clear();
    stills.set(key, (async () => {
      const video = make("video", { muted: true, playsinline: true, preload: "auto" });
      video.muted = true;
      const met = name => new Promise((done, fail) => {
        video.addEventListener(name, done, { once: true });
        video.addEventListener("error", fail, { once: true });
      });
      const loaded = met("loadeddata");
      video.src = filmUrl(index, run);
      await loaded;
      const pictures = [];
      for (const frame of frames) {
        const sought = met("seeked");
        video.currentTime = (frame + 0.5) / data.clips[index].runs[run].fps;
        await sought;
        const picture = make("canvas", { width: video.videoWidth, height: video.videoHeight });
        picture.getContext("2d").drawImage(video, 0, 0);
        pictures.push(picture);
      }
      video.removeAttribute("src");
      return pictures;
    })());
  }
  return stills.get(key);
}
let latent = [];
let plansSeen = false;
let drawing = 0;
const videoFrame = (t, T) => T > 1 ? Math.round(t * (clip().frames - 1) / (T - 1)) : 0;
async function drawPlans() {
  const plans = sites()?.plans || [];
  $("plans").hidden = !plans.length;
  if (!plans.length) return;
  at.plan = clamp(at.plan, 0, plans.length - 1);
  $("plan-sites").replaceChildren(...plans.map((plan, index) => make("button", { type: "button", role: "radio", "data-plan": index, text: `layer ${plan.layer} · step ${plan.step} · head ${plan.head}${plan.branch === "cond" ? "" : ` · ${plan.branch}`}` })));
  check($("plan-sites"), button => +button.dataset.plan === at.plan);
  if (!plansSeen) return;
  const mine = ++drawing, plan = plans[at.plan], [T, H, W] = plan.grid;
  const levels = Uint8Array.from(atob(plan.levels), c => c.charCodeAt(0));
  const own = new Uint8Array(levels.length);
  for (const [first, length] of plan.own) own.fill(1, first, first + length);
  const frames = Array.from({ length: T }, (_, t) => videoFrame(t, T));
  const pictures = await stillsOf(at.clip, at.run, frames);
  if (mine !== drawing) return;
  latent = pictures.map((picture, t) => {
    const canvas = make("canvas", { width: Math.max(picture.width, W * 8), height: Math.max(picture.height, H * 8), role: "img" });
    const context = canvas.getContext("2d"), w = canvas.width / W, h = canvas.height / H;
    context.imageSmoothingQuality = "high";
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    let work = 0;
    for (let row = 0; row < H; row++) for (let column = 0; column < W; column++) {
      const level = levels[(t * H + row) * W + column];
      if (level) work += 1 / level;
      if (!TINTS[level]) continue;
      context.fillStyle = TINTS[level];
      const x = Math.round(column * w), y = Math.round(row * h);
      context.fillRect(x, y, Math.round((column + 1) * w) - x, Math.round((row + 1) * h) - y);
    }
    const isOwn = (row, column) => row >= 0 && row < H && column >= 0 && column < W && own[(t * H + row) * W + column];
    let asks = false;
    context.beginPath();
    for (let row = 0; row < H; row++) for (let column = 0; column < W; column++) {
      if (!isOwn(row, column)) continue;
      asks = true;
      const x0 = column * w, y0 = row * h, x1 = x0 + w, y1 = y0 + h;
      if (!isOwn(row - 1, column)) { context.moveTo(x0, y0); context.lineTo(x1, y0); }
      if (!isOwn(row + 1, column)) { context.moveTo(x0, y1); context.lineTo(x1, y1); }
      if (!isOwn(row, column - 1)) { context.moveTo(x0, y0); context.lineTo(x0, y1); }
      if (!isOwn(row, column + 1)) { context.moveTo(x1, y0); context.lineTo(x1, y1); }
    }
    context.lineCap = "square";
    const line = clamp(w / 4, 2, canvas.width / 100);
    for (const [colour, wide] of [["#000", 2 * line], ["#ffd23e", line]]) { context.strokeStyle = colour; context.lineWidth = wide; context.stroke(); }
    const share = `${Math.round(work / (H * W) * 100)} %`;
    canvas.setAttribute("aria-label", `Latent frame ${t}: ${share} of dense work${asks ? ", holds the query block" : ""}`);
    const button = make("button", { type: "button", "data-frame": frames[t] }, canvas, make("span", {}, make("b", { text: asks ? `frame ${t}, asks` : `frame ${t}` }), share));
    answer(canvas, event => {
      const area = canvas.getBoundingClientRect();
      const column = clamp(Math.floor((event.clientX - area.left) / area.width * W), 0, W - 1);
      const row = clamp(Math.floor((event.clientY - area.top) / area.height * H), 0, H - 1);
      const token = (t * H + row) * W + column;
      return `latent frame ${t}, row ${row}, column ${column}\n${WORDS[levels[token]] || `level ${levels[token]}`}${own[token] ? ", asks" : ""}`;
    });
    button.addEventListener("click", () => go(frames[t]));
    return { button, frame: frames[t] };
  });
  $("strip").replaceChildren(...latent.map(each => each.button));
  const found = new Set(levels);
  $("plan-legend").replaceChildren(...Object.keys(WORDS).filter(level => found.has(+level)).map(level =>
    make("span", {}, make("i", { style: `background:${+level === 1 ? "#d9cbb0" : `linear-gradient(${TINTS[level]},${TINTS[level]}),#d9cbb0`}` }), WORDS[level])),
    make("span", {}, make("i", { style: "border:2px solid #d9a400" }), `query block ${plan.block}`));
  markLatent();
}
function markLatent() {
  let now = -1;
  latent.forEach((each, index) => { if (each.frame <= at.frame) now = index; });
  latent.forEach((each, index) => each.button.classList.toggle("now", index === now));
}
segments($("plan-sites"), button => {
  at.plan = +button.dataset.plan;
  const { layer, step, head } = sites().plans[at.plan];
  Object.assign(at, { layer, step, head });
  drawMaps();
  drawPlans();
});
new IntersectionObserver((entries, observer) => {
  if (!entries.some(entry => entry.isIntersecting)) return;
  observer.disconnect();
  plansSeen = true;
  drawPlans();
}, { rootMargin: "400px" }).observe($("plans"));

/* ---- colours, size, keyboard ---- */
document.documentElement.addEventListener("themechange", () => { if (!$("costs").hidden) drawMaps(); });
let settled = 0, lastWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === lastWidth) return;
  lastWidth = innerWidth;
  clearTimeout(settled);
  settled = setTimeout(() => { if (!$("costs").hidden) { drawMaps(); drawHeads(); } }, 80);
});
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, canvas, [role=radiogroup]")) return;
  const views = ["side", "wipe", "difference"];
  const acts = { ",": () => go(at.frame - 1), ".": () => go(at.frame + 1), ArrowLeft: () => go(at.frame - 1), ArrowRight: () => go(at.frame + 1),
    "[": () => chooseClip(at.clip - 1), "]": () => chooseClip(at.clip + 1),
    1: () => { at.view = views[0]; arrange(); }, 2: () => { at.view = views[1]; arrange(); }, 3: () => { at.view = views[2]; arrange(); } };
  if (event.key === " " && !event.target.closest("button, summary, a")) acts[" "] = () => at.playing ? pause() : play();
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
});

arrange();
chooseClip(0);
})();
