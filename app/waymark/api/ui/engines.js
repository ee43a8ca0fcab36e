// The engines in one table: status, complaint, blocks by medium, load, and a small curve of what was stored and removed.

import { askToDrain, isDrained } from "./drain.js";
import { now } from "./service.js";
import { arrange, byId, canvas, element, onTheme, painted, seconds, setAttribute, setText, several, short } from "./shown.js";

const POINTS_MAX = 60;
const WORST_FIRST = ["failed", "lost", "unreachable", "degraded", "starting", "replaying", "active", "no events"];
const UNWELL = ["failed", "lost", "unreachable", "degraded"];
const WELL = ["active", "replaying", "no events"];
// How many endpoints a complaint names that several engines have.
const ENDPOINTS_MAX = 4;
const NOT_COUNTED = ["lost", "failed"];
// What rows are sorted by; the greatest first.
const SORTS = {
  unwell: (each) => (WELL.includes(each.status) ? 0 : WORST_FIRST.length - WORST_FIRST.indexOf(each.status)),
  name: () => 0,
  stored: (each) => rateOf(each, "stored"),
  load: (each) => each.load.requests,
  blocks: (each) => total(each.blocks),
  lag: (each) => each.lag_seconds || 0,
};
// The columns, and what they show.
const COLUMNS = {
  Engine: "its instance_id, and its rank if it has several", Status: "of its stream of events, and whether it is drained",
  Blocks: "how many it has on which medium; the bar compares it with the other engines of its model",
  Requests: "requests under way, and their tokens to compute", "Blocks a second": "stored and removed",
  "Last event": "how long ago the newest batch that is applied was sent",
  Weight: "its share of requests; 0 is none", Change: "drain it, or give it requests again",
};
const NUMBERS = ["Last event", "Requests", "Weight"];
const COLOURS = { GPU: "gpu", CPU: "cpu", DISK: "disk" };
// The looks that a rate is the mean of: one look has a batch or none.
const RATE_LOOKS = 5;
const CURVE_HEIGHT = 18;

// Of each stream: how many blocks were stored and removed, look by look.
const counted = new Map();
// The parts of the page by what they show: they stay, and change where their values do.
const bodies = new Map();
const rows = new Map();
const nothing = element("p", { class: "soft" }, "None fits the filter.");
let all = null;
let answer = null;
let targets = new Set();
// The targets of each engine.
let ranks = new Map();

export function showEngines(found) {
  answer = found;
  targets = targetsOf(found.publishers);
  ranks = byEngine(targets);
  for (const each of found.publishers) remember(each);
  const known = new Set(found.publishers.map(nameOf));
  for (const map of [counted, rows]) for (const name of map.keys()) if (!known.has(name)) map.delete(name);
  fillModels(found.publishers);
  draw();
}

// How many engines are well, unwell, starting or drained; an engine is as its worst rank.
export function health() {
  const counts = { well: 0, unwell: 0, starting: 0, drained: 0 };
  for (const each of byEngine(answer.publishers.filter((one) => one.scope !== "shared")).values()) {
    const own = each.filter((rank) => targets.has(rank));
    const isStarting = each.some((rank) => !WELL.includes(rank.status));
    counts[each.some(isUnwell) ? "unwell" : own.length && isDrained(own) ? "drained" : isStarting ? "starting" : "well"]++;
  }
  return counts;
}

function isUnwell(each) {
  return UNWELL.includes(each.status);
}

function total(blocks) {
  return Object.values(blocks).reduce((sum, count) => sum + count, 0);
}

function nameOf(each) {
  return JSON.stringify([each.tenant_id, each.instance_id, each.dp_rank, each.endpoint]);
}

function byEngine(publishers) {
  const found = new Map();
  for (const each of publishers) {
    const name = engineOf(each);
    if (found.has(name)) found.get(name).push(each);
    else found.set(name, [each]);
  }
  return found;
}

function engineOf(each) {
  return JSON.stringify([each.tenant_id, each.instance_id]);
}

// What requests are sent to: no pool, and no further socket of a rank.
function targetsOf(publishers) {
  return new Set(publishers.filter((each) => each.scope !== "shared" && !each.is_further));
}

// What the record of a stream says of the time before this tab, as the points that this tab would have.
function earlier({ recent, counters }) {
  if (!recent) return [];
  const { seconds: slot, stored, removed } = recent;
  const begin = slot * (Math.floor(now() / slot) - stored.length + 1) - now() + Date.now() / 1000;
  const sum = (of, i) => of.slice(i).reduce((all, count) => all + count, 0);
  return stored.map((_, i) => ({
    at: begin + slot * i, stored: (counters.blocks_stored || 0) - sum(stored, i), removed: (counters.blocks_removed || 0) - sum(removed, i),
  }));
}

function remember(each) {
  const points = counted.get(nameOf(each)) || earlier(each);
  points.push({ at: Date.now() / 1000, stored: each.counters.blocks_stored || 0, removed: each.counters.blocks_removed || 0 });
  if (points.length > POINTS_MAX) points.shift();
  counted.set(nameOf(each), points);
}

// Offer the models for a prompt, and choose the one with the most engines.
function fillModels(publishers) {
  const list = byId("models");
  const counts = new Map();
  for (const { model_name: name } of publishers) counts.set(name, (counts.get(name) || 0) + 1);
  const names = [...counts.keys()].sort();
  if (list.dataset.names === JSON.stringify(names)) return;
  list.dataset.names = JSON.stringify(names);
  list.replaceChildren(...names.map((name) => element("option", { value: name })));
  const model = byId("model");
  if (model.value || !names.length) return;
  model.value = names.reduce((most, name) => (counts.get(name) > counts.get(most) ? name : most));
  model.dispatchEvent(new Event("input"));
}

function draw() {
  const wanted = byId("filter").value.toLowerCase();
  const shown = answer.publishers.filter((each) =>
    [each.instance_id, each.model_name, each.tenant_id, statusOf(each)].some((text) => text.toLowerCase().includes(wanted)),
  );
  setText(byId("workers"), answer.workers.length
    ? `${several(answer.publishers.length, "stream")}, ${several(answer.workers.length, "ingest worker")}`
    : "No ingest worker is alive: no event is applied until one runs.");
  setAttribute(byId("workers"), "class", answer.workers.length ? "soft" : "bad");
  byId("empty").hidden = answer.publishers.length > 0;
  byId("groups").hidden = !answer.publishers.length;
  const by = SORTS[byId("sort").value];
  shown.sort((a, b) => by(b) - by(a) || a.instance_id.localeCompare(b.instance_id) || a.dp_rank - b.dp_rank);
  const groups = new Map();
  for (const each of shown) {
    const name = JSON.stringify([each.model_name, each.tenant_id]);
    groups.set(name, [...(groups.get(name) || []), each]);
  }
  for (const name of bodies.keys()) if (!groups.has(name)) bodies.delete(name);
  const top = shown.reduce((most, each) => Math.max(most, ...ratesOf(each, "stored"), ...ratesOf(each, "removed")), 1);
  all ||= newTable();
  arrange(all.table, [all.head, ...[...groups].map(([name, each]) => body(name, each, top))]);
  arrange(byId("groups"), shown.length ? [all.box] : [nothing]);
}

function newTable() {
  const head = element("thead", {}, element("tr", {}, ...Object.entries(COLUMNS).map(([name, title]) => element("th", { scope: "col", title, class: classOf(name), "data-name": name }, name))));
  const table = element("table", { "aria-label": "Engines by model" }, head);
  const box = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Engines by model, which may be wider than the window" }, table);
  return { head, table, box };
}

// The rows of a model, below its name.
function body(name, publishers, top) {
  if (!bodies.has(name)) {
    const [{ model_name: model, tenant_id: tenant }] = publishers;
    const title = tenant === "default" ? model : `${model} of ${tenant}`;
    const head = element("tr", { class: "model" }, element("th", { scope: "rowgroup", colspan: Object.keys(COLUMNS).length }, title));
    bodies.set(name, { made: element("tbody"), head });
  }
  const { made, head } = bodies.get(name);
  const fullest = Math.max(...publishers.map((each) => total(each.blocks)), 1);
  const complaints = grouped(publishers);
  arrange(made, [head, ...publishers.flatMap((each) => row(each, top, fullest, complaints.get(each) || ""))]);
  return made;
}

// The complaints, of which those of neighbours that differ in the endpoint only are one: the last of them has it.
function grouped(publishers) {
  const cause = ({ complaint, endpoint }) => (endpoint ? complaint?.replaceAll(endpoint, "\0") : complaint);
  const complaints = new Map();
  let same = [];
  publishers.forEach((each, i) => {
    same.push(each);
    if (i + 1 < publishers.length && cause(publishers[i + 1]) === cause(each)) return;
    if (each.complaint) complaints.set(each, same.length > 1 ? complaintOf(same, cause(each)) : each.complaint);
    same = [];
  });
  return complaints;
}

function complaintOf(same, cause) {
  const endpoints = [...new Set(same.map((each) => each.endpoint))];
  const more = endpoints.length - ENDPOINTS_MAX;
  const named = endpoints.slice(0, ENDPOINTS_MAX).join(", ") + (more > 0 ? ` and ${more} more` : "");
  return `These ${same.length}: ${cause.replaceAll("\0", named)}`;
}

function row(each, top, fullest, complaint) {
  const name = nameOf(each);
  if (!rows.has(name)) rows.set(name, newRow(each));
  const { made, said, label, rank, cells, status, blocks, drawn, button } = rows.get(name);
  const { requests, tokens } = each.load;
  const isCounted = !NOT_COUNTED.includes(each.status);
  setText(label, each.scope === "shared" ? `${each.instance_id} (pool)` : each.instance_id);
  setText(rank, each.dp_rank || ranksOf(each).length > 1 ? ` rank ${each.dp_rank}` : "");
  setText(status, statusOf(each));
  setAttribute(status, "class", `status ${statusClass(each)}`);
  const media = Object.entries(each.blocks).map(([medium, count]) => `${medium} ${count}`).join(", ");
  setText(blocks.text, media ? `${media}${isCounted ? "" : " (not counted)"}` : "none");
  setAttribute(blocks.text, "class", isCounted && media ? "" : "soft");
  fill(blocks, each.blocks, fullest, isCounted);
  setText(cells["Last event"], each.lag_seconds === null ? "none" : `${seconds(each.lag_seconds)} ago`);
  setText(cells.Requests, tokens ? `${requests} (${short.format(tokens)} token${tokens === 1 ? "" : "s"})` : requests);
  setText(cells.Weight, targets.has(each) ? each.weight : "");
  setText(said.firstChild.firstChild, complaint);
  if (said.hidden === Boolean(complaint)) said.hidden = !complaint;
  curve(drawn, each, top);
  const verb = isDrained(ranksOf(each)) ? "Resume" : "Drain";
  setText(button, verb);
  setAttribute(button, "aria-label", `${verb} ${each.instance_id}`);
  if (button.hidden === targets.has(each)) button.hidden = !button.hidden;
  return [made, said];
}

// The row of an engine, and below it one for its complaint, as wide as the table.
function newRow(each) {
  const cells = Object.fromEntries(Object.keys(COLUMNS).slice(1).map((name) => [name, element("td", { class: classOf(name), "data-name": name })]));
  const status = element("span");
  cells.Status.append(status);
  const blocks = { bar: element("div", { class: "bar", "aria-hidden": "true" }), text: element("span"), last: "" };
  cells.Blocks.append(blocks.bar, blocks.text);
  const drawn = newCurve(cells["Blocks a second"]);
  const button = element("button", { type: "button", hidden: "" });
  button.addEventListener("click", () => askToDrain(ranksOf(each)));
  cells.Change.append(button);
  const [label, rank] = [element("span"), element("span", { class: "soft" })];
  const name = element("th", { scope: "row", class: "name" }, label, rank);
  const made = element("tr", { class: "engine" }, name, ...Object.values(cells));
  const said = element("tr", { class: "complaint", hidden: "" }, element("td", { class: "said", colspan: Object.keys(COLUMNS).length }, element("span")));
  return { made, said, label, rank, cells, status, blocks, drawn, button };
}

function classOf(name) {
  return NUMBERS.includes(name) ? "number" : "";
}

// Whether it is drained, or the status of its stream, or both if something is wrong.
function statusOf(each) {
  if (!targets.has(each) || each.weight) return each.status;
  const drain = each.load.requests ? "draining" : "drained";
  return WELL.includes(each.status) ? drain : `${each.status}, ${drain}`;
}

// The colour of a status: an engine that gets no requests is not as good as one that does.
function statusClass(each) {
  const isAway = targets.has(each) && !each.weight && !isUnwell(each);
  return isAway ? "drained" : each.status.replace(" ", "-");
}

// Fill the bar of an engine, as far as it is as full as the fullest.
function fill(made, blocks, fullest, isCounted) {
  const what = JSON.stringify([blocks, fullest, isCounted]);
  if (made.last === what) return;
  made.last = what;
  made.bar.replaceChildren(...Object.entries(blocks).map(([medium, count]) => {
    const part = element("span", { class: `of-${isCounted ? COLOURS[medium] || "other" : "behind"}` });
    part.style.width = `${(100 * count) / fullest}%`;
    return part;
  }));
}

// The engines of a prompt's model that are no targets now, and why as far as it is seen: names and statuses.
export function leftOut(found, scores) {
  const scored = new Set(scores.map((row) => row.instance_id));
  const others = found.instances.filter((each) => !each.is_pool && !scored.has(each.instance_id));
  return others.map(({ instance_id: name }) => {
    const own = [...targets].find((each) => each.instance_id === name && each.tenant_id === found.tenant_id);
    return { name, status: own ? statusOf(own) : "no target", kind: own ? statusClass(own) : "drained" };
  });
}

function ranksOf(each) {
  return ranks.get(engineOf(each)) || [];
}

function ratesOf(each, what) {
  const points = counted.get(nameOf(each));
  return points.slice(1).map((point, i) => Math.max(0, (point[what] - points[i][what]) / (point.at - points[i].at || 1)));
}

function rateOf(each, what) {
  const points = counted.get(nameOf(each)).slice(-RATE_LOOKS - 1);
  const [first, last] = [points[0], points.at(-1)];
  return Math.max(0, (last[what] - first[what]) / (last.at - first.at || 1));
}

function newCurve(cell) {
  const [drawn, context] = canvas(POINTS_MAX, CURVE_HEIGHT);
  const number = element("span", { class: "soft" });
  cell.append(drawn, number);
  return { context, number, last: "" };
}

// Two curves, which have the same height for the same rate in all rows. What is drawn already is not drawn again.
function curve(made, each, top) {
  // One look has no rate, and an engine that nothing is known of has none either.
  setText(made.number, counted.get(nameOf(each)).length > 1 ? `+${rateOf(each, "stored").toFixed(0)} −${rateOf(each, "removed").toFixed(0)}` : "");
  const curves = [["removed", "cpu"], ["stored", "gpu"]].map(([what, colour]) => [painted(colour), ratesOf(each, what)]);
  const what = curves.some(([, rates]) => rates.some(Boolean)) ? `${top} ${JSON.stringify(curves)}` : "";
  if (made.last === what) return;
  made.last = what;
  made.context.clearRect(0, 0, POINTS_MAX, CURVE_HEIGHT);
  for (const [colour, rates] of curves.filter(([, each]) => each.some(Boolean))) {
    made.context.strokeStyle = colour;
    made.context.beginPath();
    rates.forEach((rate, i) => made.context.lineTo(POINTS_MAX - rates.length + i + 0.5, CURVE_HEIGHT - 1 - ((CURVE_HEIGHT - 2) * rate) / top));
    made.context.stroke();
  }
}

const redraw = () => answer && draw();
for (const id of ["filter", "sort"]) byId(id).addEventListener("input", redraw);
onTheme(redraw);
const origin = new URL(".", location.href).href.replace(/\/$/, "");
byId("register-command").textContent = `waymark register http://ENGINE:8000 --url ${origin}`;
byId("simulate-command").textContent = `waymark simulate --engines 3 --register ${origin}`;
