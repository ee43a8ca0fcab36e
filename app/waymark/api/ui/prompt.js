// A prompt on all engines: which block is where, why nobody has it, and which target it would be sent to.

import { drawLines, forget, listen, place, pools } from "./cells.js";
import { post } from "./service.js";
import { byId, element, plain, setText, several } from "./shown.js";
import { leftOut } from "./engines.js";

// Of an engine without a block of its own, for which pools have some.
const NO_HOLDER = { medium: "", runs: [], not_counted: null };
const ID_MAX = 2 ** 32 - 1;
const RANGE_MAX = 2 ** 21;
let shared = "";
let asked = 0;

export function startPrompt() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(given());
  });
  listen(byId("answer"));
}

// The prompt that the fragment names by its hashes: a link never has the prompt itself.
export function showShared() {
  const words = location.hash.slice(1).split("?")[1];
  if (!words || words === shared) return;
  shared = words;
  const fields = new URLSearchParams(words);
  byId("model").value = fields.get("model") || "";
  byId("tenant").value = fields.get("tenant") || "default";
  // The hashes of a link already include adapter and salt.
  byId("lora").value = byId("salt").value = "";
  document.querySelector('input[name="form"][value="seq_hashes"]').checked = true;
  byId("text").value = (fields.get("hashes") || "").replaceAll(".", " ");
  ask(given());
}

function given() {
  const form = document.querySelector('input[name="form"]:checked').value;
  const named = { lora_name: byId("lora").value, cache_salt: byId("salt").value };
  const given = Object.fromEntries(Object.entries(named).filter(([, value]) => value));
  return { model: byId("model").value, tenant_id: byId("tenant").value || "default", ...given, ...read(form, byId("text").value) };
}

function read(form, text) {
  const words = text.split(/[\s,[\]]+/).filter(Boolean);
  if (form === "token_ids") return readIds(words);
  // As decimal texts: a hash is larger than a number of this language.
  if (form === "seq_hashes") return { seq_hashes: words.map((word) => (/^[0-9a-f]{16}$/i.test(word) ? BigInt(`0x${word}`).toString() : word)) };
  if (form === "prompt") return { prompt: text };
  try {
    const parsed = JSON.parse(text);
    return { messages: Array.isArray(parsed) ? parsed : parsed.messages };
  } catch (error) {
    return { problem: `The messages are not JSON: ${error.message}` };
  }
}

// Token ids, and ranges of them such as 100-163.
function readIds(words) {
  const ids = [];
  for (const [place, word] of words.entries()) {
    const [, first, last = first] = /^(\d{1,10})(?:-(\d{1,10}))?$/.exec(word) || [];
    const count = last - first + 1;
    if (!(count >= 1 && count <= RANGE_MAX && last <= ID_MAX)) {
      return { problem: `"${plain(word)}" at ${place} is no token id; they are integers of 0..${ID_MAX}, or ranges such as 100-163` };
    }
    for (let id = Number(first); id <= Number(last); id++) ids.push(id);
  }
  return { token_ids: ids };
}

async function ask(body) {
  const own = ++asked;
  clear(body.problem || "", body.problem ? "" : "asking");
  if (body.problem) return;
  try {
    const found = await post("inspect/prompt", { ...body, top: 1000 });
    const scores = body.seq_hashes ? null : await scored(body);
    if (own !== asked) return; // another prompt has been given meanwhile
    share(found);
    setText(byId("summary"), summary(found));
    byId("answer").replaceChildren(...parts(found, scores));
    drawLines();
  } catch (error) {
    if (own === asked) clear(error.message, "");
  }
}

function clear(problem, summary) {
  byId("ask-error").textContent = problem;
  setText(byId("summary"), summary);
  byId("answer").replaceChildren();
  forget();
}

function summary({ block_size: size, total_blocks: all, blocks_held: held, longest_matched: most }) {
  return size ? `${several(all, "block")} of ${size} tokens, ${held} of them held; the longest match has ${most} tokens.` : "The prompt was not looked up.";
}

// Without a target there is nothing to show of them, and the prompt is worth showing all the same.
async function scored(body) {
  try {
    return await post("score", { ...body, explain: true });
  } catch (error) {
    return { problem: error.message, scores: [] };
  }
}

function share(found) {
  if (!location.hash.startsWith("#prompt") || !found.keys.length || found.keys.length > 2000) return;
  const fields = new URLSearchParams({ model: found.model, tenant: found.tenant_id, hashes: found.keys.join(".") });
  shared = fields.toString();
  history.replaceState(null, "", `#prompt?${shared}`);
}

function parts(found, scores) {
  const made = found.reasons.map((reason) => element("p", { class: "reason" }, reason));
  if (scores) made.push(picked(scores));
  else made.push(element("p", { class: "soft" }, "A link has only the hashes of a prompt. Give the prompt itself to see which target POST /select would pick."));
  const rows = found.total_blocks ? found.instances : []; // without a block every engine has the same reason
  if (rows.length) made.push(legend(), element("p", { id: "cell", class: "soft" }, "Point at a block, or focus a line and use the arrow keys."));
  made.push(...rows.map((each) => instance(each, found)));
  if (rows.length && found.instances_left_out) made.push(element("p", {}, `and ${found.instances_left_out} more`));
  if (scores) made.push(...targets(scores, found));
  return made;
}

function legend() {
  const mark = (name, text) => element("span", {}, element("i", { class: `of-${name}` }), text);
  return element("p", { class: "legend" }, mark("gpu", "GPU, the device"), mark("cpu", "CPU, the host"), mark("disk", "disk"), mark("other", "other medium"), mark("pool", "in a pool"), mark("behind", "not counted: behind a missing block, or of a lost engine"), mark("none", "not held"));
}

function instance(each, found) {
  const of = each.is_pool ? "a pool: its blocks count for every engine" : `${each.longest_matched} tokens`;
  const made = element("section", {}, element("h3", {}, each.instance_id, ": ", of));
  if (each.note) made.append(element("p", { class: "reason" }, each.note));
  const isEmpty = !each.holders.length && !each.is_pool && pools(found).length;
  for (const holder of isEmpty ? [NO_HOLDER] : each.holders) made.append(place(each, holder, found));
  return made;
}

// Which target would get the prompt, or why none would.
function picked(scores) {
  if (scores.problem) return element("p", { class: "reason" }, scores.problem);
  const [first] = scores.scores;
  if (!first) return element("p", { class: "reason" }, "POST /select would pick no target: none is registered, or all are drained.");
  const isCost = first.cost !== null;
  const why = `policy ${scores.policy}: ${isCost ? "least cost" : "greatest score"}`;
  return element("p", {}, "POST /select would pick ", element("strong", {}, first.instance_id), ` rank ${first.dp_rank} (${why}); the scores of all targets are below.`);
}

// Without an exponent, and with four digits where it is small.
function number(value) {
  return Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
}

function targets(scores, found) {
  if (scores.problem || !scores.scores.length) return [];
  const isCost = scores.scores[0].cost !== null;
  const head = ["Engine", "Rank", isCost ? "Cost" : "Score", "Tokens it has", "Tokens to compute", "Tokens waiting", "Requests", "Parts"];
  const rows = scores.scores.map((row, i) => element(
    "tr", {},
    element("th", { scope: "row", class: "name" }, i ? row.instance_id : element("strong", {}, row.instance_id)),
    element("td", { class: "number" }, row.dp_rank),
    element("td", { class: "number" }, number(isCost ? row.cost : row.score)),
    element("td", { class: "number" }, row.device_tokens + row.host_tokens + row.disk_tokens),
    element("td", { class: "number" }, row.new_tokens),
    element("td", { class: "number" }, row.wait_tokens),
    element("td", { class: "number" }, row.active_requests),
    element("td", { class: "parts" }, Object.entries(row.parts).map(([name, value]) => `${name} ${number(value)}`).join(", ")),
  ));
  const table = element("table", { id: "targets", "aria-label": "Scores of the targets" }, element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))), element("tbody", {}, ...rows));
  return [
    element("h3", {}, "Targets"),
    element("p", {}, `In the order of the policy ${scores.policy}; ${isCost ? "less" : "greater"} is better.`),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Scores of the targets, which may be wider than the window" }, table),
    ...leftOut(found, scores.scores).map((text) => element("p", { class: "reason" }, `Not considered: ${text}.`)),
  ];
}
