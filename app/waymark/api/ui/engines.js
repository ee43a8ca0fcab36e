// Engines by model: status, complaint, blocks by medium, lag, load, and small curves of what was stored and removed.

import { canvas, element, painted, plain, seconds } from "./shown.js";

const POINTS_MAX = 90;
const WORST_FIRST = ["failed", "lost", "degraded", "pending", "replaying", "active"];
// What rows are sorted by; the greatest first.
const SORTS = {
  name: () => 0,
  status: (each) => -WORST_FIRST.indexOf(each.status),
  stored: (each) => ratesOf(each, "stored").at(-1) || 0,
  load: (each) => each.load.requests,
  blocks: (each) => Object.values(each.blocks).reduce((sum, count) => sum + count, 0),
  lag: (each) => each.lag_seconds || 0,
};
const COLUMNS = ["Engine", "Rank", "Status", "Blocks", "Lag", "Stored", "Removed", "Load", "Weight", "Complaint"];

// Of each stream: how many blocks were stored and removed, look by look.
const counted = new Map();
let answer = null;

export function showEngines(found) {
  answer = found;
  for (const each of found.publishers) remember(each);
  const known = new Set(found.publishers.map(nameOf));
  for (const name of counted.keys()) if (!known.has(name)) counted.delete(name);
  fillModels(found.publishers);
  draw();
}

function nameOf(each) {
  return JSON.stringify([each.tenant_id, each.instance_id, each.dp_rank]);
}

function remember(each) {
  const points = counted.get(nameOf(each)) || [];
  points.push({ at: Date.now() / 1000, stored: each.counters.blocks_stored || 0, removed: each.counters.blocks_removed || 0 });
  if (points.length > POINTS_MAX) points.shift();
  counted.set(nameOf(each), points);
}

function fillModels(publishers) {
  const list = document.getElementById("models");
  const names = [...new Set(publishers.map((each) => each.model_name))].sort();
  if (list.dataset.names === JSON.stringify(names)) return;
  list.dataset.names = JSON.stringify(names);
  list.replaceChildren(...names.map((name) => element("option", { value: name })));
  const model = document.getElementById("model");
  if (!model.value && names.length === 1) model.value = names[0];
}

function draw() {
  const wanted = document.getElementById("filter").value.toLowerCase();
  const rows = answer.publishers.filter((each) =>
    [each.instance_id, each.model_name, each.tenant_id, each.status].some((text) => text.toLowerCase().includes(wanted)),
  );
  document.getElementById("workers").textContent = answer.workers.length
    ? `${answer.publishers.length} streams, ${answer.workers.length} ingest workers`
    : "No ingest worker is alive: no event is applied until one runs.";
  const groups = new Map();
  for (const each of rows) {
    const title = each.tenant_id === "default" ? each.model_name : `${each.model_name} of ${each.tenant_id}`;
    groups.set(title, [...(groups.get(title) || []), each]);
  }
  const tables = [...groups].map(([title, each]) => [element("h3", {}, title), table(title, each)]).flat();
  const empty = element("p", { class: "soft" }, answer.publishers.length ? "None fits the filter." : "No engine is registered.");
  document.getElementById("groups").replaceChildren(...(tables.length ? tables : [empty]));
}

function table(title, publishers) {
  const head = element("tr", {}, ...COLUMNS.map((name) => element("th", { scope: "col" }, name)));
  const by = SORTS[document.getElementById("sort").value];
  publishers.sort((a, b) => by(b) - by(a) || a.instance_id.localeCompare(b.instance_id) || a.dp_rank - b.dp_rank);
  const made = element("table", { "aria-label": plain(title) });
  made.append(element("thead", {}, head), element("tbody", {}, ...publishers.map(row)));
  return element("div", { class: "scroll" }, made);
}

function row(each) {
  const blocks = Object.entries(each.blocks).map(([medium, count]) => `${medium} ${count}`).join(", ");
  const name = each.scope === "shared" ? `${plain(each.instance_id)} (pool)` : each.instance_id;
  return element(
    "tr",
    {},
    element("td", { class: "name" }, name),
    element("td", { class: "number" }, each.dp_rank),
    element("td", { class: each.status }, each.status),
    element("td", {}, blocks || "none"),
    element("td", { class: "number" }, seconds(each.lag_seconds)),
    element("td", {}, curve(each, "stored", "gpu")),
    element("td", {}, curve(each, "removed", "cpu")),
    element("td", { class: "number" }, each.load.requests),
    element("td", { class: "number" }, each.weight),
    element("td", { class: "said" }, each.complaint || ""),
  );
}

function ratesOf(each, what) {
  const points = counted.get(nameOf(each));
  return points.slice(1).map((point, i) => Math.max(0, (point[what] - points[i][what]) / (point.at - points[i].at || 1)));
}

function curve(each, what, colour) {
  const rates = ratesOf(each, what);
  const [made, context] = canvas(POINTS_MAX, 18, `${(rates.at(-1) || 0).toFixed(0)} blocks ${what} a second`);
  const top = Math.max(1, ...rates);
  context.strokeStyle = painted(colour);
  context.beginPath();
  rates.forEach((rate, i) => context.lineTo(POINTS_MAX - rates.length + i + 0.5, 17 - (16 * rate) / top));
  context.stroke();
  return made;
}

for (const id of ["filter", "sort"]) document.getElementById(id).addEventListener("input", () => answer && draw());
