// The blocks of a prompt that an engine has, as a line of cells on a canvas. A line is drawn when it is in sight.

import { byId, canvas, element, onTheme, painted, plain, setAttribute, sharpen } from "./shown.js";

const ROW_BLOCKS = 32;
const CELL_MIN = 4;
const CELL_MAX = 64;
const CELL_HEIGHT = 14;
const MISSING = { top: 6, height: 2 };
// What a pool has for an engine that does not have it itself.
const POOLED = { top: 4, height: 6 };
// A canvas has a largest width; what is beyond it can be asked for by its hashes.
const CANVAS_MAX = 16000;
// Beyond so many pixels, of four bytes each, lines out of sight give back theirs.
const PIXELS_MAX = 16777216;
const COLOURS = { GPU: "gpu", CPU: "cpu", DISK: "disk" };
// The fastest first.
const MEDIA = Object.keys(COLOURS);
// How far a key moves.
const STEPS = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: ROW_BLOCKS, PageDown: -ROW_BLOCKS, Home: -Infinity, End: Infinity };
const lines = new Map();
// Those with pixels; the first ones were longest out of sight.
const drawn = new Set();
let pixels = 0;
const mark = element("span", { class: "mark" });
const gaps = new Map();

// The width comes with the entry: asking an element for it would lay out the page once for each line.
const inSight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting, boundingClientRect } of entries) see(target, isIntersecting, boundingClientRect.width);
  for (const line of drawn) if (pixels > PIXELS_MAX && !lines.get(line).isNear) release(line);
}, { rootMargin: "400px" });

// A line for some holders of an instance: all of them, of which each block has its fastest medium, or one of them.
export function place(instance, holders, found) {
  const pooled = instance.is_pool ? [] : pools(found);
  const isAll = holders === instance.holders;
  const own = union(holders.flatMap((each) => each.runs));
  const count = `${lengthOf(own)} of ${found.total_blocks} blocks`;
  const label = isAll ? count : `rank ${holders[0].dp_rank} ${holders[0].medium}: ${count}`;
  const whys = [...new Set(holders.map((each) => each.not_counted).filter(Boolean))].map(plain).join(", ");
  const line = element("div", {
    class: isAll ? "line" : "line part", tabindex: "0", role: "slider", "aria-label": plain(`${instance.instance_id}, ${label}${whys && `, ${whys}`}`),
    "aria-valuemin": 0, "aria-valuemax": Math.max(0, found.total_blocks - 1), "aria-valuenow": 0, "aria-valuetext": "no block chosen",
  }, isAll ? null : element("div", { class: "soft" }, label, whys && `, ${whys}`), element("div", { class: "cells scroll", tabindex: "-1" }));
  const match = (instance.is_pool ? found.longest_matched : instance.longest_matched) / found.block_size;
  lines.set(line, { instance, holders: slowestFirst(holders), found, pooled, match, at: -1, width: 0, isNear: false });
  return line;
}

// In the order in which they are painted: the fastest medium that counts is the last one.
function slowestFirst(holders) {
  const order = (each) => (each.not_counted ? 0 : 1 + MEDIA.length - (MEDIA.includes(each.medium) ? MEDIA.indexOf(each.medium) : MEDIA.length));
  return [...holders].sort((a, b) => order(a) - order(b));
}

// What pools have of a prompt, which counts for every engine.
function pools(found) {
  return found.instances.filter((each) => each.is_pool).flatMap((each) => each.holders).filter((each) => !each.not_counted).flatMap((each) => each.runs);
}

function lengthOf(runs) {
  return runs.reduce((sum, [, length]) => sum + length, 0);
}

// Runs that are apart from each other, of runs that may overlap.
function union(runs) {
  const apart = [];
  for (const [first, length] of [...runs].sort((a, b) => a[0] - b[0])) {
    const last = apart.at(-1);
    if (last && first <= last[0] + last[1]) last[1] = Math.max(last[1], first + length - last[0]);
    else apart.push([first, length]);
  }
  return apart;
}

// Forget the lines of the answer before.
export function forget() {
  inSight.disconnect();
  lines.clear();
  drawn.clear();
  pixels = 0;
}

// Begin to draw the lines, which are in the page now.
export function drawLines() {
  for (const line of lines.keys()) inSight.observe(line);
}

function see(line, isNear, room) {
  const state = lines.get(line);
  if (!state) return;
  state.isNear = isNear;
  if (isNear && !drawn.has(line) && room) draw(line, state, room);
  // Those that are near, or have just been, come last.
  if (drawn.delete(line)) drawn.add(line);
}

function release(line) {
  const { canvas: made } = lines.get(line).context;
  pixels -= made.width * made.height;
  made.width = 0;
  drawn.delete(line);
}

function draw(line, state, room) {
  if (state.context) sharpen(state.context.canvas, state.cells * state.width, CELL_HEIGHT);
  else addCanvas(line, state, room);
  const { canvas: made } = state.context;
  pixels += made.width * made.height;
  drawn.add(line);
  paint(state);
}

function addCanvas(line, state, room) {
  const count = state.found.total_blocks;
  const width = Math.max(CELL_MIN, Math.min(CELL_MAX, Math.floor(room / Math.max(1, count))));
  const cells = Math.min(count, Math.floor(CANVAS_MAX / width));
  const [made, context] = canvas(cells * width, CELL_HEIGHT);
  state.width = width;
  state.context = context;
  state.cells = cells;
  line.lastElementChild.append(made);
}

// One rectangle for each run, and then the gaps between all cells at once.
function paint(state) {
  const { holders, pooled, match, context, width, cells } = state;
  const all = [cells * width, CELL_HEIGHT];
  context.clearRect(0, 0, ...all);
  context.fillStyle = painted("behind");
  context.fillRect(0, MISSING.top, all[0], MISSING.height);
  for (const run of union(pooled)) fill(state, run, "pool", POOLED, match);
  for (const { runs, medium, not_counted: why } of holders) {
    for (const run of runs) fill(state, run, COLOURS[medium] || "other", { top: 0, height: CELL_HEIGHT }, why ? 0 : match);
  }
  context.globalCompositeOperation = "destination-out";
  context.fillStyle = gap(context, width);
  context.fillRect(0, 0, ...all);
  context.globalCompositeOperation = "source-over";
}

// A run in its colour, and in another one from where the match ends.
function fill({ context, width, cells }, [first, length], colour, { top, height }, counted) {
  const end = Math.min(first + length, cells);
  const middle = Math.min(Math.max(first, counted), end);
  for (const [from, to, name] of [[first, middle, colour], [middle, end, "behind"]]) {
    if (to <= from) continue;
    context.fillStyle = painted(name);
    context.fillRect(from * width, top, (to - from) * width, height);
  }
}

function gap(context, width) {
  if (!gaps.has(width)) {
    const tile = element("canvas");
    tile.width = width;
    tile.height = 1;
    tile.getContext("2d").fillRect(width - 1, 0, 1, 1);
    gaps.set(width, tile);
  }
  return context.createPattern(gaps.get(width), "repeat");
}

function show(line, at) {
  const state = lines.get(line);
  const { found, holders, instance } = state;
  if (!(at >= 0 && at < found.total_blocks) || (state.at === at && mark.parentNode === line.lastElementChild)) return;
  state.at = at;
  const key = found.keys[at];
  const size = found.block_size;
  const has = (one) => one.runs.some(([first, length]) => first <= at && at < first + length);
  const others = found.instances.flatMap((each) =>
    each.holders.filter(has).map((one) => `${plain(each.instance_id)}${each.is_pool ? " (pool)" : ""} rank ${one.dp_rank} ${one.medium}${one.not_counted ? " (not counted)" : ""}`));
  const where = `${plain(instance.instance_id)}${holders.length === 1 ? ` rank ${holders[0].dp_rank}` : ""}`;
  const media = [...holders].reverse().filter(has).map((one) => plain(one.medium));
  const said = media.length ? `${where} has it on ${[...new Set(media)].join(" and ")}. ` : `${where} does not have it${holders.length === 1 ? ` on ${plain(holders[0].medium)}` : ""}. `;
  const everywhere = `Holders: ${others.join(", ") || "none"}. `;
  byId("cell").firstChild.replaceChildren(
    element("div", {}, element("strong", {}, `Block ${at}`), ` (tokens ${at * size} to ${(at + 1) * size - 1}): ${said}`, everywhere, "Key ", element("code", {}, key), "."),
    element("div", {}, "With waymark: ", element("code", {}, `waymark inspect block ${key} --url ${location.origin}`)),
    // A row has 32 blocks, and what is not in it stands by itself. No redis-cli reaches an emulated Redis.
    found.rows.length ? element("div", {}, `In Redis, the row of its ${ROW_BLOCKS} blocks: `, element("code", {}, `redis-cli GET '${plain(found.rows[Math.floor(at / ROW_BLOCKS)])}'`)) : "",
  );
  setAttribute(line, "aria-valuenow", at);
  setAttribute(line, "aria-valuetext", `block ${at}: ${said}${everywhere}Key ${key}`);
  mark.style.left = `${at * state.width}px`;
  mark.style.width = `${state.width - 1}px`;
  line.lastElementChild.append(mark);
  keepInSight();
}

// What is said of a block is at the end of the window, or at its top if it would lie over the line of the block.
function keepInSight() {
  const said = byId("cell")?.firstChild;
  const line = mark.closest(".line");
  if (!said || !line) return;
  said.classList.remove("above");
  const { top, bottom } = line.getBoundingClientRect();
  const isCovered = bottom > said.getBoundingClientRect().top && top < innerHeight;
  said.classList.toggle("above", isCovered);
}

function lineOf(event) {
  const line = event.target.closest(".line");
  return line && lines.has(line) ? line : null;
}

// Lines come and go, so their container listens to their events.
export function listen(parent) {
  parent.addEventListener("pointermove", (event) => {
    const line = event.target.tagName === "CANVAS" && lineOf(event);
    if (line) show(line, Math.floor(event.offsetX / lines.get(line).width));
  });
  parent.addEventListener("focusin", (event) => {
    const line = lineOf(event);
    if (line) show(line, Math.max(0, lines.get(line).at));
  });
  parent.addEventListener("keydown", (event) => {
    const line = lineOf(event);
    if (!line || !(event.key in STEPS)) return;
    event.preventDefault();
    const { found, at } = lines.get(line);
    show(line, Math.max(0, Math.min(found.total_blocks - 1, Math.max(0, at) + STEPS[event.key])));
    mark.scrollIntoView({ block: "nearest", inline: "nearest" });
    keepInSight();
  });
  addEventListener("scroll", keepInSight, { passive: true });
  onTheme(() => {
    for (const line of drawn) paint(lines.get(line));
  });
}
