// Drain an engine, after a question: it gets no new requests. And give it requests again.

import { act } from "./service.js";
import { byId, plain, several } from "./shown.js";

let changed = () => {};
let asked = null;
// The question whose change is under way.
let busy = null;

// The callback is called when an engine has another weight.
export function startDrain(callback) {
  changed = callback;
  byId("drain-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (busy !== asked) change();
  });
  byId("drain-cancel").addEventListener("click", () => byId("drain").close());
}

// Ask whether an engine is to be drained, or to get requests again. The ranks are all of its rows.
export function askToDrain(ranks) {
  const [{ instance_id: name, tenant_id: tenant }] = ranks;
  const requests = ranks.reduce((sum, each) => sum + each.load.requests, 0);
  const all = ranks.length > 1 ? `All ${ranks.length} ranks` : "It";
  asked = { instance_id: name, tenant_id: tenant, isDrained: isDrained(ranks) };
  const verb = asked.isDrained ? "Resume" : "Drain";
  byId("drain-title").textContent = `${verb} ${plain(name)}?`;
  byId("drain-text").textContent = asked.isDrained
    ? `${all} will get requests again.`
    : `${all} will get no new requests from Waymark (POST /select, gateways and pickers). Under way: ${several(requests, "request")}, which will end as usual.`;
  byId("drain-weighted").hidden = !asked.isDrained;
  byId("drain-weight").value = "1";
  byId("drain-yes").textContent = verb;
  byId("drain-error").textContent = "";
  byId("drain").showModal();
}

export function isDrained(ranks) {
  return ranks.every((each) => each.weight === 0);
}

async function change() {
  const own = (busy = asked);
  const { isDrained: isBack, ...engine } = own;
  byId("drain-error").textContent = "";
  try {
    await act("weight", { ...engine, weight: isBack ? Number(byId("drain-weight").value) : 0 });
    if (own === asked) byId("drain").close(); // another engine may be asked about by now
    changed();
  } catch (error) {
    if (own === asked) byId("drain-error").textContent = error.message;
  } finally {
    if (busy === own) busy = null;
  }
}
