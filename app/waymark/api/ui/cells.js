// The blocks of a prompt that one holder has, as a line of cells on a canvas. A line is drawn when it is in sight.

import { canvas, element, painted, plain } from "./shown.js";

const ROW_BLOCKS = 32;
const CELL_MIN = 4;
const CELL_MAX = 14;
const COLOURS = { GPU: "gpu", CPU: "cpu", DISK: "disk" };
const lines = new WeakMap();

const inSight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
}, { rootMargin: "400px" });

export function place(instance, holder, found) {
  const held = new Set();
  for (const [first, length] of holder.runs) for (let i = 0; i < length; i++) held.add(first + i);
  const label = `rank ${holder.dp_rank} ${holder.medium}: ${held.size} of ${found.total_blocks} blocks`;
  const line = element("div", { class: "line", tabindex: "0", role: "group", "aria-label": plain(`${instance.instance_id}, ${label}`) },
    element("div", { class: "soft" }, label, holder.not_counted ? `, ${plain(holder.not_counted)}` : ""),
    element("div", { class: "cells scroll" }));
  const match = instance.is_pool ? found.longest_matched : instance.longest_matched;
  lines.set(line, { instance, holder, found, held, counted: holder.not_counted ? 0 : match / found.block_size, at: -1, width: 0 });
  return line;
}

// Begin to draw the lines inside an element.
export function cellsOf(parent) {
  for (const line of parent.querySelectorAll(".line")) {
    inSight.observe(line);
    line.addEventListener("pointermove", (event) => show(line, Math.floor(event.offsetX / lines.get(line).width)));
    line.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      show(line, lines.get(line).at + step);
    });
  }
}

function draw(line) {
  const state = lines.get(line);
  const box = line.querySelector(".cells");
  if (box.firstChild) return;
  const count = state.found.total_blocks;
  state.width = Math.max(CELL_MIN, Math.min(CELL_MAX, Math.floor(box.clientWidth / Math.max(1, count))));
  // A canvas has a largest width; what is beyond it can be asked for by its hashes.
  const cells = Math.min(count, Math.floor(16000 / state.width));
  const [made, context] = canvas(cells * state.width, 14, line.getAttribute("aria-label"));
  const colours = { held: painted(COLOURS[state.holder.medium] || "other"), behind: painted("behind"), none: painted("line") };
  for (let i = 0; i < cells; i++) {
    const isHeld = state.held.has(i);
    context.fillStyle = isHeld ? (i < state.counted ? colours.held : colours.behind) : colours.none;
    context.fillRect(i * state.width, isHeld ? 0 : 6, state.width - 1, isHeld ? 14 : 2);
  }
  box.replaceChildren(made);
}

function show(line, at) {
  const state = lines.get(line);
  const { found, holder, instance } = state;
  if (!(at >= 0 && at < found.total_blocks)) return;
  state.at = at;
  const key = found.keys[at];
  const others = [];
  for (const each of found.instances) {
    for (const one of each.holders) {
      if (one.runs.some(([first, length]) => first <= at && at < first + length)) others.push(`${plain(each.instance_id)} rank ${one.dp_rank} ${one.medium}`);
    }
  }
  const has = state.held.has(at) ? "has" : "does not have";
  document.getElementById("cell").replaceChildren(
    element("strong", {}, `Block ${at}`), `: ${plain(instance.instance_id)} rank ${holder.dp_rank} ${has} it on ${plain(holder.medium)}. `,
    `Holders: ${others.join(", ") || "none"}. `,
    "Key ", element("code", {}, key), ". ", element("code", {}, `waymark inspect block ${key}`),
    // A row has 32 blocks, and what is not in it stands by itself.
    " ", element("code", {}, `redis-cli GET '${plain(found.rows[Math.floor(at / ROW_BLOCKS)])}'`),
  );
}
