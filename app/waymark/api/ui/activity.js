// What happens, from GET /activity. EventSource cannot send a token, so the stream is read here.

import { ask } from "./service.js";
import { byId, element, setText, several } from "./shown.js";

// How many events a connection begins with, and how many the page keeps.
const FIRST = 100;
const ROWS_MAX = 500;
const AGAIN_MS = 2000;
// The service sends something every five seconds; if it is silent for so long, it is gone.
const SILENT_MS = 20000;
let last = "";

export async function startActivity() {
  await follow().catch((error) => say(`The activity cannot be read now: ${error.message}; trying again.`));
  setTimeout(startActivity, AGAIN_MS);
}

// Show events as they come, until the connection ends. Throws where none comes about.
async function follow() {
  const stop = new AbortController();
  const wait = () => setTimeout(() => stop.abort(new Error("Waymark does not answer")), SILENT_MS);
  let silent = wait();
  try {
    const answer = await ask("activity", { headers: last ? { "Last-Event-ID": last } : {}, signal: stop.signal });
    say("");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(silent);
      silent = wait();
      text += value;
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        take(text.slice(0, end));
        text = text.slice(end + 2);
      }
    }
  } finally {
    clearTimeout(silent);
    stop.abort();
  }
}

// What each kind of event is called, in one tense, and how it looks. Another release may have further kinds.
const KINDS = {
  registered: ["registered"], unregistered: ["unregistered"], drain: ["drained", "drained"], resume: ["resumed", "active"], weight: ["weight changed"],
  takeover: ["taken over", "degraded"], restart: ["restarted", "degraded"], unreachable: ["became unreachable", "unreachable"],
  reachable: ["became reachable", "active"], lost: ["lost", "lost"], found: ["found again", "active"], sweep: ["swept"], snapshot: ["read by snapshot"],
  drift: ["drifted", "degraded"],
};

// With its day, as a list may go back for weeks.
function when(date) {
  return `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })}, ${date.toLocaleTimeString("en-GB")}`;
}

// How far back the list goes, and who has more; behind a trouble, if there is one.
function say(trouble) {
  const rows = byId("events");
  const count = rows.childElementCount;
  const all = count ? `${several(count, "event")}, back to ${rows.lastElementChild.firstElementChild.textContent}. `
    + `A tab begins with the newest ${FIRST} and shows ${ROWS_MAX} at most; Redis keeps about 10,000.` : "";
  setText(byId("how-far"), `${trouble} ${all}`.trim() || "Nothing has happened yet.");
}

function take(event) {
  const fields = Object.fromEntries(event.split("\n").map((line) => line.split(/: (.*)/s, 2)));
  if (!fields.data) return;
  last = fields.id;
  const { at, kind, instance_id: name = "", dp_rank: rank, model = "", detail = "" } = JSON.parse(fields.data);
  const rows = byId("events");
  const [said, look = ""] = KINDS[kind] || [kind];
  rows.prepend(element(
    "tr", {},
    element("td", { class: "when", title: new Date(at * 1000).toISOString() }, when(new Date(at * 1000))),
    element("td", { class: look }, said),
    element("td", { class: "name" }, rank ? `${name} rank ${rank}` : name),
    element("td", { class: "name" }, model),
    element("td", { class: "detail" }, detail),
  ));
  while (rows.childElementCount > ROWS_MAX) rows.lastElementChild.remove();
  say("");
}
