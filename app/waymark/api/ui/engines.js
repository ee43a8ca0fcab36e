// Engines by model: status, complaint, blocks by medium, lag, load, and small curves of what was stored and removed.

import { askToDrain, isDrained } from "./drain.js";
import { arrange, byId, canvas, element, onTheme, painted, plain, seconds, setAttribute, setText, several } from "./shown.js";

const POINTS_MAX = 90;
const WORST_FIRST = ["failed", "lost", "unreachable", "degraded", "starting", "replaying", "active", "no events"];
// What rows are sorted by; the greatest first.
const SORTS = {
  name: () => 0,
  status: (each) => -WORST_FIRST.indexOf(each.status),
  stored: (each) => rateOf(each, "stored"),
  load: (each) => each.load.requests,
  blocks: (each) => Object.values(each.blocks).reduce((sum, count) => sum + count, 0),
  lag: (each) => each.lag_seconds || 0,
};
// The columns, and what they show.
const COLUMNS = {
  Engine: "its instance_id", Rank: "the data-parallel rank", Status: "of its stream of events, and whether it is drained",
  Blocks: "how many it has on which medium", "Last event": "how long ago the newest batch that is applied was sent",
  Stored: "blocks stored a second", Removed: "blocks removed a second", Requests: "requests under way, and their tokens to compute",
  Weight: "its share of requests; 0 is none", Change: "drain it, or give it requests again",
};
const NUMBERS = ["Rank", "Last event", "Requests", "Weight"];
// The looks that a rate is the mean of: one look has a batch or none.
const RATE_LOOKS = 5;
const CURVE_HEIGHT = 18;

// Of each stream: how many blocks were stored and removed, look by look.
const counted = new Map();
// The parts of the page by what they show: they stay, and change where their values do.
const tables = new Map();
const rows = new Map();
const nothing = element("p", { class: "soft" });
let answer = null;
let targets = new Set();

export function showEngines(found) {
  answer = found;
  targets = targetsOf(found.publishers);
  for (const each of found.publishers) remember(each);
  const known = new Set(found.publishers.map(nameOf));
  for (const map of [counted, rows]) for (const name of map.keys()) if (!known.has(name)) map.delete(name);
  fillModels(found.publishers);
  draw();
}

function nameOf(each) {
  return JSON.stringify([each.tenant_id, each.instance_id, each.dp_rank, each.endpoint]);
}

// What requests are sent to: no pool, and no further socket of a rank.
function targetsOf(publishers) {
  return new Set(publishers.filter((each) => each.scope !== "shared" && !each.is_further));
}

function remember(each) {
  const points = counted.get(nameOf(each)) || [];
  points.push({ at: Date.now() / 1000, stored: each.counters.blocks_stored || 0, removed: each.counters.blocks_removed || 0 });
  if (points.length > POINTS_MAX) points.shift();
  counted.set(nameOf(each), points);
}

function fillModels(publishers) {
  const list = byId("models");
  const names = [...new Set(publishers.map((each) => each.model_name))].sort();
  if (list.dataset.names === JSON.stringify(names)) return;
  list.dataset.names = JSON.stringify(names);
  list.replaceChildren(...names.map((name) => element("option", { value: name })));
  const model = byId("model");
  if (!model.value && names.length === 1) model.value = names[0];
}

function draw() {
  const wanted = byId("filter").value.toLowerCase();
  const shown = answer.publishers.filter((each) =>
    [each.instance_id, each.model_name, each.tenant_id, statusOf(each)].some((text) => text.toLowerCase().includes(wanted)),
  );
  setText(byId("workers"), answer.workers.length
    ? `${several(answer.publishers.length, "stream")}, ${several(answer.workers.length, "ingest worker")}`
    : "No ingest worker is alive: no event is applied until one runs.");
  const groups = new Map();
  for (const each of shown) {
    const title = each.tenant_id === "default" ? each.model_name : `${each.model_name} of ${each.tenant_id}`;
    groups.set(title, [...(groups.get(title) || []), each]);
  }
  for (const title of tables.keys()) if (!groups.has(title)) tables.delete(title);
  const top = shown.reduce((most, each) => Math.max(most, ...ratesOf(each, "stored"), ...ratesOf(each, "removed")), 1);
  const parts = [...groups].flatMap(([title, each]) => table(title, each, top));
  setText(nothing, answer.publishers.length ? "None fits the filter." : "No engine is registered.");
  arrange(byId("groups"), parts.length ? parts : [nothing]);
}

function table(title, publishers, top) {
  if (!tables.has(title)) tables.set(title, newTable(plain(title)));
  const { parts, body } = tables.get(title);
  const by = SORTS[byId("sort").value];
  publishers.sort((a, b) => by(b) - by(a) || a.instance_id.localeCompare(b.instance_id) || a.dp_rank - b.dp_rank);
  arrange(body, publishers.flatMap((each) => row(each, top)));
  return parts;
}

function newTable(title) {
  const head = element("tr", {}, ...Object.entries(COLUMNS).map(([name, title]) => element("th", { scope: "col", title, class: classOf(name) }, name)));
  const body = element("tbody");
  const made = element("table", { "aria-label": `Engines of ${title}` }, element("thead", {}, head), body);
  const box = { class: "scroll", tabindex: "0", role: "region", "aria-label": `Engines of ${title}, which may be wider than the window` };
  return { parts: [element("h3", {}, title), element("div", box, made)], body };
}

function row(each, top) {
  const name = nameOf(each);
  if (!rows.has(name)) rows.set(name, newRow(each));
  const { made, said, cells, curves, button } = rows.get(name);
  const blocks = Object.entries(each.blocks).map(([medium, count]) => `${medium} ${count}`).join(", ");
  const { requests, tokens } = each.load;
  const isCounted = !["lost", "failed"].includes(each.status);
  setText(cells.Status, statusOf(each));
  setAttribute(cells.Status, "class", each.status);
  setText(cells.Blocks, blocks ? `${blocks}${isCounted ? "" : " (not counted)"}` : "none");
  setAttribute(cells.Blocks, "class", isCounted ? "" : "soft");
  setText(cells["Last event"], each.lag_seconds === null ? "none" : `${seconds(each.lag_seconds)} ago`);
  setText(cells.Requests, tokens ? `${requests} (${tokens} tokens)` : requests);
  setText(cells.Weight, targets.has(each) ? each.weight : "");
  setText(said.firstChild.firstChild, each.complaint || "");
  if (said.hidden === Boolean(each.complaint)) said.hidden = !each.complaint;
  for (const what of ["stored", "removed"]) curve(curves[what], ratesOf(each, what), rateOf(each, what), top);
  if (button) {
    const verb = isDrained(ranksOf(each)) ? "Resume" : "Drain";
    setText(button, verb);
    setAttribute(button, "aria-label", `${verb} ${plain(each.instance_id)}`);
  }
  return [made, said];
}

// The row of an engine, and below it one for its complaint, as wide as the table.
function newRow(each) {
  const cells = Object.fromEntries(Object.keys(COLUMNS).slice(1).map((name) => [name, element("td", { class: classOf(name) })]));
  cells.Rank.textContent = each.dp_rank;
  const curves = { stored: newCurve(cells.Stored, "gpu"), removed: newCurve(cells.Removed, "cpu") };
  const button = targets.has(each) ? element("button", { type: "button" }) : null;
  if (button) {
    button.addEventListener("click", () => askToDrain(ranksOf(each)));
    cells.Change.append(button);
  }
  const name = each.scope === "shared" ? `${plain(each.instance_id)} (pool)` : each.instance_id;
  const made = element("tr", {}, element("th", { scope: "row", class: "name" }, name), ...Object.values(cells));
  const said = element("tr", { hidden: "" }, element("td", { class: "said", colspan: Object.keys(COLUMNS).length }, element("span")));
  return { made, said, cells, curves, button };
}

function classOf(name) {
  return [NUMBERS.includes(name) ? "number" : "", ["Rank", "Removed"].includes(name) ? "spare" : ""].join(" ").trim();
}

// The status of its stream, and whether it is drained.
function statusOf(each) {
  if (!targets.has(each) || each.weight) return each.status;
  return `${each.status}, ${each.load.requests ? "draining" : "drained"}`;
}

// The engines of a prompt's model that are no targets now, and why as far as it is seen.
export function leftOut(found, scores) {
  const scored = new Set(scores.map((row) => row.instance_id));
  const others = found.instances.filter((each) => !each.is_pool && !scored.has(each.instance_id));
  const states = others.map(({ instance_id: name }) => {
    const own = [...targets].find((each) => each.instance_id === name && each.tenant_id === found.tenant_id);
    return `${plain(name)} (${own ? statusOf(own) : "no target"})`;
  });
  return states.length ? [states.join(", ")] : [];
}

function ranksOf({ instance_id: name, tenant_id: tenant }) {
  return [...targets].filter((each) => each.instance_id === name && each.tenant_id === tenant);
}

function ratesOf(each, what) {
  const points = counted.get(nameOf(each));
  return points.slice(1).map((point, i) => Math.max(0, (point[what] - points[i][what]) / (point.at - points[i].at || 1)));
}

function rateOf(each, what) {
  const rates = ratesOf(each, what).slice(-RATE_LOOKS);
  return rates.length ? rates.reduce((sum, rate) => sum + rate, 0) / rates.length : 0;
}

function newCurve(cell, colour) {
  const [drawn, context] = canvas(POINTS_MAX, CURVE_HEIGHT);
  const number = element("span", { class: "soft" });
  cell.append(drawn, number);
  return { drawn, context, number, colour, last: "" };
}

// All curves have the same height for the same rate. What is drawn already is not drawn again.
function curve(made, rates, rate, top) {
  setText(made.number, `${rate.toFixed(0)}/s`);
  const what = rates.some(Boolean) ? `${top} ${painted(made.colour)} ${rates}` : "";
  if (made.last === what) return;
  made.last = what;
  made.context.clearRect(0, 0, POINTS_MAX, CURVE_HEIGHT);
  made.context.strokeStyle = painted(made.colour);
  made.context.beginPath();
  rates.forEach((rate, i) => made.context.lineTo(POINTS_MAX - rates.length + i + 0.5, CURVE_HEIGHT - 1 - ((CURVE_HEIGHT - 2) * rate) / top));
  made.context.stroke();
}

const redraw = () => answer && draw();
for (const id of ["filter", "sort"]) byId(id).addEventListener("input", redraw);
onTheme(redraw);
