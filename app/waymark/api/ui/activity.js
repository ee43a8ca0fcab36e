// What happens, from GET /activity. EventSource cannot send a token, so the stream is read here.

import { send } from "./service.js";
import { byId, element } from "./shown.js";

const ROWS_MAX = 500;
const AGAIN_MS = 2000;
let last = "";

export async function startActivity() {
  try {
    const answer = await send("activity", { headers: last ? { "Last-Event-ID": last } : {} });
    if (answer.ok) await read(answer.body.pipeThrough(new TextDecoderStream()).getReader());
  } catch {
    // The state says what is wrong.
  }
  setTimeout(startActivity, AGAIN_MS);
}

async function read(reader) {
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      take(text.slice(0, end));
      text = text.slice(end + 2);
    }
  }
}

// The day is said where it is not today.
function when(date) {
  const day = { day: "numeric", month: "short" };
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? time : `${date.toLocaleDateString("en-GB", day)}, ${time}`;
}

function take(event) {
  const fields = Object.fromEntries(event.split("\n").map((line) => line.split(/: (.*)/s, 2)));
  if (!fields.data) return;
  last = fields.id;
  const { at, kind, instance_id: name = "", dp_rank: rank, model = "", detail = "" } = JSON.parse(fields.data);
  const rows = byId("events");
  byId("no-events").hidden = true;
  rows.prepend(element(
    "tr", {},
    element("td", { class: "when", title: new Date(at * 1000).toISOString() }, when(new Date(at * 1000))),
    element("td", { class: kind === "lost" ? "lost" : "" }, kind),
    element("td", { class: "name" }, rank ? `${name} rank ${rank}` : name),
    element("td", { class: "name" }, model),
    element("td", { class: "detail" }, detail),
  ));
  while (rows.childElementCount > ROWS_MAX) rows.lastElementChild.remove();
}
