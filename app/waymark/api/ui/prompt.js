// A prompt on all engines: a line an engine with its blocks, where its match ends and why, and the targets in order.

import { drawLines, forget, listen, place } from "./cells.js";
import { now, post } from "./service.js";
import { byId, element, plain, setText, several } from "./shown.js";
import { leftOut } from "./engines.js";

const ID_MAX = 2 ** 32 - 1;
const RANGE_MAX = 2 ** 21;
// What the field has until something is written into it.
// It is what two engines of `waymark demo` know: a prompt of less than one block would find nothing.
const TEXT = "A router asks which engine has the beginning of a prompt. The engine with most of it need not compute that part again, "
  + "so the first token comes sooner. What an engine has is kept in blocks of a few tokens each. A block counts only if all the blocks "
  + "before it are there too, because each token depends on those before it. When the memory of a graphics card is full, an engine moves "
  + "old blocks to the memory of its machine, then to a disk, or forgets them. Each time it sends an event, and an index of these events "
  + "knows what every engine has at this moment. The engine with the longest match is often the best choice, but not always: if many "
  + "requests wait there, another one may answer earlier, although it computes the whole prompt. So a router compares the tokens to compute "
  + "with the work that is under way, and picks the engine that costs least. Two people who ask about the same document then meet the same "
  + "engine, and the second of them waits only for the words of the question.";
const EXAMPLES = {
  prompt: TEXT, messages: JSON.stringify([{ role: "user", content: TEXT }]), token_ids: "1000-1159", seq_hashes: "",
};
// What a part of a cost stands for, where its name alone does not say it.
const PARTS = {
  wait: "the tokens that wait there",
  new: "the tokens to compute, by the weight of the policy. An engine computes at least the end of a prompt behind its last full block, and a whole last block "
    + "too, and what is not on the GPU may count for less, so it can be more than the column says",
  active: "the requests under way, by the weight of the policy",
};
let shared = "";
let asked = 0;
let isByHolder = false;

export function startPrompt() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(given());
  });
  byId("model").addEventListener("input", offerShow);
  for (const each of document.getElementsByName("form")) each.addEventListener("change", showExample);
  byId("text").placeholder = "hashes of blocks, decimal or as 16 hex digits";
  byId("ask-ids").addEventListener("click", () => {
    document.querySelector('input[name="form"][value="token_ids"]').checked = true;
    byId("text").value = "";
    showExample();
    ask(given());
  });
  showExample();
  listen(byId("answer"));
}

function chosen() {
  return document.querySelector('input[name="form"]:checked').value;
}

// Without a model nothing can be asked: the button would do nothing.
function offerShow() {
  byId("show").disabled = !byId("model").value;
  byId("show").title = byId("model").value ? "" : "There is no model yet";
}

function showExample() {
  if (["", ...Object.values(EXAMPLES)].includes(byId("text").value)) byId("text").value = EXAMPLES[chosen()];
}

// The prompt that the fragment names by its hashes: a link never has the prompt itself.
export function showShared() {
  const words = location.hash.slice(1).split("?")[1];
  if (!words || words === shared) return;
  shared = words;
  const fields = new URLSearchParams(words);
  byId("model").value = fields.get("model") || "";
  offerShow();
  byId("tenant").value = fields.get("tenant") || "default";
  // The hashes of a link already include adapter and salt.
  byId("lora").value = byId("salt").value = "";
  document.querySelector('input[name="form"][value="seq_hashes"]').checked = true;
  byId("text").value = (fields.get("hashes") || "").replaceAll(".", " ");
  ask(given());
}

function given() {
  const named = { lora_name: byId("lora").value, cache_salt: byId("salt").value };
  const given = Object.fromEntries(Object.entries(named).filter(([, value]) => value));
  return { model: byId("model").value, tenant_id: byId("tenant").value || "default", ...given, ...read(chosen(), byId("text").value) };
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
    setText(byId("summary"), `${summary(found)} Asked at ${new Date(1000 * now()).toLocaleTimeString("en-GB")}.`);
    byId("answer").replaceChildren(...parts(found, scores));
    drawLines();
  } catch (error) {
    if (own !== asked) return;
    clear(error.message, "");
    byId("ask-ids").hidden = !(error.reason === "no_tokenizer" || /could tokenize/.test(error.message));
  }
}

function clear(problem, summary) {
  byId("ask-error").textContent = problem;
  byId("ask-ids").hidden = true;
  setText(byId("summary"), summary);
  byId("answer").replaceChildren();
  forget();
}

function summary({ block_size: size, total_blocks: all, blocks_held: held, longest_matched: most }) {
  return size ? `${several(all, "block")} of ${several(size, "token")}, ${held} of them held; the longest match has ${several(most, "token")}.` : "The prompt was not looked up.";
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
  if (scores) made.push(picked(scores, found));
  else made.push(element("p", { class: "soft" }, "A link has only the hashes of a prompt. Give the prompt itself to see which target POST /select would pick."));
  if (found.total_blocks) made.push(...lines(found, scores)); // without a block every engine has the same reason
  if (scores) made.push(...targets(scores, found).filter(Boolean));
  return made;
}

// A line an engine, in the order in which a request would go to them; those that get none are last, and then pools.
function lines(found, scores) {
  const order = new Map();
  for (const { instance_id: name } of scores?.scores || []) if (!order.has(name)) order.set(name, order.size + 1);
  const away = new Map(scores && !scores.problem ? leftOut(found, scores.scores).map((each) => [each.name, each]) : []);
  const placeOf = (each) => (each.is_pool ? Infinity : order.get(each.instance_id) || (order.size ? 1e9 : 0));
  const sorted = [...found.instances].sort((a, b) => placeOf(a) - placeOf(b) || b.longest_matched - a.longest_matched);
  const made = [element("div", { class: "legends" }, legend(), choice(found))];
  const list = element("div", { id: "lines", class: isByHolder ? "by-holder" : "" });
  for (const each of sorted) list.append(instance(each, found, order.get(each.instance_id), away.get(each.instance_id)));
  made.push(list);
  if (found.instances_left_out) made.push(element("p", {}, `and ${found.instances_left_out} more`));
  made.push(element("div", { id: "cell" }, element("div", { class: "said soft" })));
  return made;
}

// Whether each rank and medium has a line of its own.
function choice(found) {
  const box = element("input", { type: "checkbox", id: "by-holder" });
  box.checked = isByHolder;
  box.addEventListener("change", () => {
    isByHolder = box.checked;
    byId("lines").classList.toggle("by-holder", isByHolder);
  });
  return found.instances.some((each) => each.holders.length > 1) ? element("label", {}, box, " a line for each rank and medium") : null;
}

function legend() {
  const mark = (name, text) => element("span", {}, element("i", { class: `of-${name}` }), text);
  return element("p", { class: "legend" }, mark("gpu", "GPU"), mark("cpu", "CPU"), mark("disk", "disk"), mark("other", "other medium"), mark("pool", "in a pool"), mark("behind", "held, not counted"), mark("none", "not held"), element("span", { class: "soft" }, "Point at a block, or focus a line and use the arrow keys."));
}

// Why the match of an engine ends where it does, in a few words: the view of the engines has the whole complaint of a stream.
function noteOf(each, away) {
  const said = each.note?.replace(`, status ${away?.status}`, "").replace(/ \((?!not counted\)$).*\)$/s, "; Engines says why"); // its status stands before it
  return plain(said || (each.is_pool ? "its blocks count for every engine" : each.longest_matched ? "it has the whole prompt" : ""));
}

function instance(each, found, at, away) {
  const isBest = at === 1;
  const name = element("h3", { class: "name" }, isBest ? element("strong", {}, each.instance_id) : each.instance_id);
  const has = each.is_pool ? element("span", { class: "soft" }, "pool") : element("span", {}, String(each.longest_matched), element("span", { class: "soft" }, each.longest_matched === 1 ? " token" : " tokens"));
  const note = noteOf(each, away);
  const why = element("div", { class: "why" }, away ? element("span", { class: `status ${away.kind}` }, away.status) : "", away && note ? " · " : "", note);
  const held = element("div", { class: "held" }, place(each, each.holders, found));
  if (each.holders.length > 1) held.append(element("div", { class: "holders" }, ...each.holders.map((holder) => place(each, [holder], found))));
  return element("section", { class: away ? "away" : "" }, element("span", { class: "place soft" }, at ? `${at}.` : ""), name, element("span", { class: "has" }, has), held, why);
}

// Which target would get the prompt, or why none would.
function picked(scores, found) {
  if (scores.problem) return element("p", { class: "reason" }, scores.problem);
  const [first] = scores.scores;
  if (!first) return element("p", { class: "reason" }, "POST /select would pick no target: none is registered, or all are drained.");
  const isCost = first.cost !== null;
  const why = `policy ${scores.policy}: ${isCost ? "least cost" : "greatest score"} first, as the engines below`;
  return element(
    "p", {}, "POST /select would pick ", element("strong", {}, first.instance_id), ` rank ${first.dp_rank} (${why}). `,
    element("span", { id: "why-picked" }, whyPicked(first, scores, found)),
  );
}

function tokensOf(row) {
  return row.device_tokens + row.host_tokens + row.disk_tokens;
}

// The pick beside the target that has most of the prompt, as a sentence.
function whyPicked(first, { scores }, found) {
  const has = tokensOf(first);
  const most = scores.reduce((best, row) => (tokensOf(row) > tokensOf(best) ? row : best));
  const away = leftOut(found, scores).find(({ name }) => found.instances.some((each) => each.instance_id === name && each.longest_matched > tokensOf(most)));
  const also = away ? ` ${away.name} has more, but it is no target: ${away.status}.` : "";
  const all = found.total_tokens;
  if (tokensOf(most) > has) {
    return `${most.instance_id} has ${tokensOf(most)} of the ${several(all, "token")}${slower(most)} and this one ${has}, but ${against(most, first)}.${also}`;
  }
  if (!has) return `No target has a block of the prompt.${also}`;
  const others = scores.filter((row) => row !== first && tokensOf(row) === has);
  const beside = others.length ? `as ${several(others.length, "other target")} ${others.length === 1 ? "does" : "do"}` : "and no other target has as many";
  const chance = others.some((row) => row.cost === first.cost && row.score === first.score) ? " Chance decides among equals." : "";
  return `It has ${has} of the ${several(all, "token")}${slower(first)}, ${beside}.${chance}${although(first, scores[1])}${also}`;
}

// How many of the tokens of a target have to come to the GPU first, which is a part of its cost.
function slower(row) {
  const count = row.host_tokens + row.disk_tokens;
  return count ? ` (${count} of them not on the GPU)` : "";
}

function ahead(count) {
  return `${several(count, "request")} ${count === 1 ? "is" : "are"} ahead of it there`;
}

function costs(row, other) {
  return `it costs ${number(row.cost)}, against ${number(other.cost)}`;
}

// The pick beside the next target, if that has fewer requests.
function although(first, next) {
  if (!next || first.cost === null || first.active_requests <= next.active_requests) return "";
  return ` Though ${ahead(first.active_requests)}, against ${next.active_requests} on ${next.instance_id}, ${costs(first, next)}.`;
}

// What a target has against it that another one has less of.
function against(row, other) {
  if (row.cost === null) return `its score is ${number(row.score)}, against ${number(other.score)}`;
  const more = (name) => row.parts[name] - other.parts[name];
  const worst = Object.keys(row.parts).reduce((one, name) => (more(name) > more(one) ? name : one));
  if (worst === "active") return `${ahead(row.active_requests)}, against ${other.active_requests}: ${costs(row, other)}`;
  if (worst === "wait") return `${several(row.wait_tokens, "token")} ${row.wait_tokens === 1 ? "is" : "are"} to be computed there before, against ${other.wait_tokens}: ${costs(row, other)}`;
  return costs(row, other);
}

// Without an exponent, and with four digits where it is small.
function number(value) {
  return Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
}

// The targets in the order of the policy, and below them those that it does not consider.
function targets(scores, found) {
  if (scores.problem || !scores.scores.length) return [];
  const isCost = scores.scores[0].cost !== null;
  const head = ["", "Engine", "Rank", isCost ? "Cost" : "Score", "Tokens it has", "Tokens to compute", "Tokens waiting", "Requests", "Parts"];
  const kind = (i) => (i > 1 && i < 8 ? "number" : "");
  const numbers = head.slice(2, 8);
  const rows = scores.scores.map((row, i) => element(
    "tr", {},
    element("td", { class: "soft" }, `${i + 1}.`),
    element("th", { scope: "row", class: "name" }, i ? row.instance_id : element("strong", {}, row.instance_id)),
    ...[
      row.dp_rank, number(isCost ? row.cost : row.score), row.device_tokens + row.host_tokens + row.disk_tokens,
      row.new_tokens, row.wait_tokens, row.active_requests,
    ].map((value, j) => element("td", { class: "number", "data-name": numbers[j] }, value)),
    element("td", { class: "parts" }, Object.entries(row.parts).map(([name, value]) => `${name} ${number(value)}`).join(", ")),
  ));
  rows.push(...leftOut(found, scores.scores).map((each) => element(
    "tr", { class: "away" },
    element("td"),
    element("th", { scope: "row", class: "name" }, each.name),
    element("td", { colspan: head.length - 2 }, "not considered: ", element("span", { class: `status ${each.kind}` }, each.status)),
  )));
  const table = element("table", { id: "targets", "aria-label": "Scores of the targets" }, element("thead", {}, element("tr", {}, ...head.map((name, i) => element(name ? "th" : "td", name ? { scope: "col", class: kind(i) } : {}, name)))), element("tbody", {}, ...rows));
  return [
    element("h3", {}, "Targets"),
    element("p", { class: "soft" }, `In the order of the policy ${scores.policy}; ${isCost ? "less" : "greater"} is better.`),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Scores of the targets, which may be wider than the window" }, table),
    meanings(Object.keys(scores.scores[0].parts)),
  ];
}

// What the parts of a cost are, as far as their names do not say it.
function meanings(names) {
  const known = names.filter((name) => name in PARTS);
  return known.length ? element("p", { class: "soft", id: "meanings" }, `Parts: ${known.map((name) => `${name} is ${PARTS[name]}`).join("; ")}.`) : null;
}
