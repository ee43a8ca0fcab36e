// Requests to the service, with the token that it may ask for, and what to say of how they went.

import { byId } from "./shown.js";

let token = sessionStorage.getItem("token") || "";
let asking = null;
let report = () => {};
// How far the clock of the service is ahead of that of this machine.
let aheadMs = 0;

export function onState(callback) {
  report = callback;
}

// The time of the service, in seconds.
export function now() {
  return (Date.now() + aheadMs) / 1000;
}

export function get(path) {
  return request(path, {});
}

export function post(path, body) {
  return request(path, posted(body));
}

// A change, which a person has asked for: who has no token for it may give one, or leave it.
export function act(path, body) {
  return request(path, { ...posted(body), isAct: true });
}

function posted(body) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

// The JSON of an answer. Throws an Error with the sentence of the service.
async function request(path, options) {
  const answer = await send(path, options);
  const content = await answer.json();
  if (answer.ok) return content;
  throw Object.assign(new Error(content.error || `/${path} was answered with ${answer.status}`), { reason: content.reason });
}

// The answer, once there is a token that it accepts. Throws where none comes, or where Redis is unavailable.
export async function send(path, { isAct = false, ...options }) {
  for (;;) {
    let answer;
    const sent = token;
    try {
      const headers = { ...options.headers, ...(sent ? { Authorization: `Bearer ${sent}` } : {}) };
      answer = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      report("Waymark does not answer; trying again", true);
      throw new Error("Waymark does not answer");
    }
    const date = Date.parse(answer.headers.get("Date"));
    if (date) aheadMs = date - Date.now();
    if (answer.status === 401 || (answer.status === 403 && isAct)) {
      const why = answer.status === 403 ? (await answer.json()).error : sent && "This token was refused.";
      if ((await login(sent, why || "", isAct)) || !isAct) continue;
      throw new Error("No token was given, and nothing has changed.");
    }
    // A question shows its own error, which may be that of a tokenizer.
    if (answer.status === 503 && !options.method) report("Redis is unavailable; trying again", true);
    else if (answer.ok) report("live", false);
    return answer;
  }
}

// Ask for a token, once for all requests that need it. Whether one was given: who wants to act may leave it.
function login(refused, why, mayLeave) {
  if (token !== refused) return Promise.resolve(true); // another request has got one meanwhile
  asking ||= new Promise((resolve) => {
    const dialog = byId("login");
    const field = byId("token");
    byId("login-error").textContent = why;
    byId("login-cancel").hidden = !mayLeave;
    byId("login-cancel").onclick = () => dialog.close("left");
    field.value = dialog.returnValue = "";
    dialog.oncancel = (event) => {
      event.preventDefault();
      if (mayLeave) dialog.close("left");
    };
    dialog.onclose = () => {
      const isGiven = dialog.returnValue !== "left";
      if (isGiven) {
        token = field.value.trim();
        sessionStorage.setItem("token", token);
      }
      field.value = "";
      asking = null;
      resolve(isGiven);
    };
    if (!mayLeave) report("a token is needed", true);
    dialog.showModal();
  });
  return asking;
}
