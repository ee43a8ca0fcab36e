// The first line: requests, tokens saved, hits and engines. Their last day comes from the books, so a new tab has it too.

import { look, now } from "./service.js";
import { byId, element, onTheme, painted, seconds, setText, several, short } from "./shown.js";
import { health } from "./engines.js";

const EVERY_MS = 5000;
const WHOLE_SECONDS = 600;
const DAY_MINUTES = 1440;
// The most points of a curve. A point of the last hours has one minute, and of a day five.
const POINTS_MAX = DAY_MINUTES / 5;
const CURVE_HEIGHT = 48;
const whole = new Intl.NumberFormat("en");
const percent = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "");

// The rows of GET /books by their minute. An answer replaces the minutes that it has.
const minutes = new Map();
let readAt = 0;
let isRead = false;
// When the whole day was read. It is read again now and then, as Redis may have been emptied.
let wholeAt = -Infinity;

// Of some minutes: what they come to, or null if nothing is known.
const VALUES = {
  requests: ({ requests, minutes: count }) => requests / (60 * count),
  saved: ({ earned, minutes: count }) => earned / count,
  hits: ({ delivered, prompt_tokens: prompt }) => (prompt ? delivered / prompt : null),
};
const SAID = {
  requests: (sum) => `${several(whole.format(sum.requests), "request")}`,
  saved: (sum) => `${several(whole.format(sum.earned), "token")}`,
  hits: (sum) => (sum.prompt_tokens ? `${percent(sum.delivered, sum.prompt_tokens)} of ${short.format(sum.prompt_tokens)} tokens` : "no request"),
};
const TITLES = {
  requests: ["Requests", "requests that have ended, of POST /select, gateways and pickers"],
  saved: ["Tokens saved by routing", "prompt tokens that were not computed again because the engine was not chosen at random"],
  hits: ["Share of hits", "the share of prompt tokens that engines had and did not compute, as they say themselves"],
};
const COLOURS = { requests: "disk", saved: "gpu", hits: "other" };
const tiles = new Map();
const engines = { big: element("strong"), note: element("p", { class: "soft" }), bar: element("div", { class: "bar", "aria-hidden": "true" }) };

export function startFigures() {
  const made = Object.keys(TITLES).map(newTile);
  const last = element("div", { class: "figure" }, element("h3", {}, "Engines"), element("p", { class: "value" }, engines.big), engines.note, engines.bar);
  byId("figures").append(...made, last);
  onTheme(draw);
  new ResizeObserver(draw).observe(byId("figures"));
  lookAgain();
}

function newTile(name) {
  const [title, meaning] = TITLES[name];
  const tile = { big: element("strong"), unit: element("span", { class: "soft" }), note: element("p", { class: "soft" }), drawn: element("canvas", { "aria-hidden": "true" }), last: "", at: -1 };
  tile.drawn.addEventListener("pointermove", (event) => point(name, event.offsetX / tile.drawn.clientWidth));
  tile.drawn.addEventListener("pointerleave", () => point(name, -1));
  tiles.set(name, tile);
  return element(
    "div", { class: "figure", title: meaning }, element("h3", {}, title), element("p", { class: "value" }, tile.big, tile.unit), tile.note, tile.drawn,
    element("p", { class: "axis soft", "aria-hidden": "true" }, element("span", { class: "since" }), element("span", {}, "now")),
  );
}

async function lookAgain() {
  const before = now();
  const isWhole = before - wholeAt > WHOLE_SECONDS;
  const behind = Math.min(DAY_MINUTES, isWhole ? DAY_MINUTES : Math.ceil((before - readAt) / 60) + 2);
  await look(`books?since=${behind}m`, (found) => {
    readAt = before;
    isRead = true;
    const rows = new Map(found.by_minute.map((row) => [row.time / 60, row]));
    // The requests of a minute only grow.
    const first = thisMinute() - behind + 2;
    const isLess = [...minutes].some(([minute, row]) => minute >= first && row.requests > (rows.get(minute)?.requests || 0));
    if (isWhole) wholeAt = before;
    if (isLess) wholeAt = -Infinity;
    if (isWhole || isLess) minutes.clear();
    for (const [minute, row] of rows) minutes.set(minute, row);
    for (const minute of minutes.keys()) if (minute <= thisMinute() - DAY_MINUTES) minutes.delete(minute);
    draw();
  });
  setTimeout(lookAgain, EVERY_MS);
}

function thisMinute() {
  return Math.floor(now() / 60);
}

// The sum over the minutes from ``first`` to ``last``, of which the present one has not ended.
function sum(first, last) {
  const total = { minutes: last - first + 1, requests: 0, unreported: 0, earned: 0, delivered: 0, prompt_tokens: 0 };
  if (last === thisMinute()) total.minutes -= 1 - Math.max(1, now() % 60) / 60;
  for (let minute = first; minute <= last; minute++) {
    const row = minutes.get(minute);
    if (row) for (const name of ["requests", "unreported", "earned", "delivered", "prompt_tokens"]) total[name] += row[name];
  }
  return total;
}

// The first minute that is known: before it nothing is drawn, as a new Waymark would seem to have had less to do.
function earliest() {
  return minutes.size ? Math.max(thisMinute() - DAY_MINUTES + 1, Math.min(...minutes.keys())) : thisMinute();
}

// How many minutes a point of the curves has.
function step() {
  return Math.ceil((thisMinute() - earliest() + 1) / POINTS_MAX);
}

// The points of the curves from the first known minute, of which the last has not ended.
function points() {
  const each = step();
  const begin = earliest();
  return Array.from({ length: Math.ceil((thisMinute() - begin + 1) / each) }, (_, i) => {
    const first = begin + each * i;
    return { first, ...sum(first, Math.min(first + each - 1, thisMinute())) };
  });
}

function draw() {
  if (!isRead || byId("engines-view").hidden) return;
  const day = sum(thisMinute() - DAY_MINUTES + 1, thisMinute());
  const begin = earliest();
  const present = sum(Math.max(thisMinute() - 1, begin), thisMinute());
  const told = day.requests - day.unreported;
  const rate = VALUES.requests(present);
  const unknown = !day.requests ? "no request in 24 h" : told ? "" : "the engines do not say what they reuse";
  if (day.requests) show("requests", rate && rate < 10 ? rate.toFixed(1) : rate.toFixed(0), " a second", `${short.format(day.requests)} in 24 h`);
  else show("requests", "none", "", unknown);
  show("saved", told ? short.format(day.earned) : "none", "", unknown || "in 24 h, more than by chance");
  show("hits", percent(day.delivered, day.prompt_tokens) || "none", "", unknown || `of ${short.format(day.prompt_tokens)} prompt tokens in 24 h`);
  for (const each of document.querySelectorAll(".since")) setText(each, minutes.size ? `${seconds(60 * (thisMinute() - begin + 1))} ago` : "");
  const all = minutes.size ? points() : [];
  for (const name of tiles.keys()) curve(name, all);
}

function show(name, value, unit, note) {
  const tile = tiles.get(name);
  setText(tile.big, value);
  setText(tile.unit, unit);
  tile.said = note;
  if (tile.at < 0) setText(tile.note, note);
}

// What a point of a curve stands for, at a share of its width, instead of what the whole day does.
function point(name, at) {
  const tile = tiles.get(name);
  tile.at = at;
  const all = points();
  const found = at < 0 || !minutes.size ? null : all[Math.min(all.length - 1, Math.round(at * (all.length - 1)))];
  const time = (minute) => new Date(60000 * minute).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  setText(tile.note, found ? `${time(found.first)} to ${time(found.first + step())}: ${SAID[name](found)}` : tile.said || "");
}

// A curve as wide as the tile. What is drawn already is not drawn again.
function curve(name, all) {
  const tile = tiles.get(name);
  const values = all.map(VALUES[name]);
  const most = name === "hits" ? 1 : Math.max(...values.map((value) => value || 0), 1e-9);
  const width = tile.drawn.clientWidth;
  const what = `${width} ${painted(COLOURS[name])} ${values.map((value) => (value === null ? "" : value.toFixed(3)))}`;
  if (!width || tile.last === what) return;
  tile.last = what;
  const scale = devicePixelRatio || 1;
  tile.drawn.width = Math.round(width * scale);
  tile.drawn.height = Math.round(CURVE_HEIGHT * scale);
  const context = tile.drawn.getContext("2d");
  context.scale(scale, scale);
  context.lineWidth = 1.5;
  context.strokeStyle = context.fillStyle = painted(COLOURS[name]);
  const x = (i) => (i * width) / Math.max(1, values.length - 1);
  const y = (value) => CURVE_HEIGHT - 1 - ((CURVE_HEIGHT - 3) * Math.max(0, value)) / most;
  // Between two gaps: a line, and what is below it.
  for (let i = 0; i < values.length; i++) {
    if (values[i] === null) continue;
    const from = i;
    while (i + 1 < values.length && values[i + 1] !== null) i++;
    const line = new Path2D();
    // A point alone is as wide as half of the way to its neighbours.
    const half = values.length > 1 ? Math.max(1, x(1) / 2) : width;
    const [left, right] = from === i ? [Math.max(0, x(i) - half), Math.min(width, x(i) + half)] : [x(from), x(i)];
    line.moveTo(left, y(values[from]));
    for (let j = from; j <= i; j++) line.lineTo(x(j), y(values[j]));
    line.lineTo(right, y(values[i]));
    context.stroke(line);
    line.lineTo(right, CURVE_HEIGHT);
    line.lineTo(left, CURVE_HEIGHT);
    context.globalAlpha = 0.15;
    context.fill(line);
    context.globalAlpha = 1;
  }
}

// How many engines are well, and how many are not.
export function showHealth() {
  const { well, ...others } = health();
  const parts = Object.entries({ well, ...others }).filter(([, count]) => count);
  const named = Object.entries(others).filter(([, count]) => count);
  setText(engines.big, parts.length ? `${well} well` : "none");
  const what = JSON.stringify(parts);
  if (engines.bar.dataset.parts === what) return;
  engines.bar.dataset.parts = what;
  // Only the unwell are a fault.
  const said = named.flatMap(([name, count], i) => [i ? ", " : "", element("span", name === "unwell" ? { class: "bad" } : {}, `${count} ${name}`)]);
  engines.note.replaceChildren(...(said.length ? said : [well ? "all of them" : "none is registered"]));
  engines.bar.replaceChildren(...parts.map(([name, count]) => {
    const part = element("span", { class: `is-${name}` });
    part.style.flexGrow = count;
    return part;
  }));
}
