// Requests to the service, with the token that it may ask for, and what to say of how they went.

import { byId } from "./shown.js";

// How long an answer is waited for, and one that is asked for again and again: a peer that has gone says nothing at all.
const ANSWER_MS = 60000;
const LOOK_MS = 15000;
let token = stored();
let asking = null;
let report = () => {};
// How far the clock of the service is ahead of that of this machine.
let aheadMs = 0;
// Of each path that is looked at: its last look, and what went wrong with it.
const looks = new Map();
const troubles = new Map();

// A browser may block this storage. Then the token is known for as long as the page stays.
function stored() {
  try {
    return sessionStorage.getItem("token") || "";
  } catch {
    return "";
  }
}
function store() {
  try {
    sessionStorage.setItem("token", token);
  } catch {
    // As above.
  }
}

export function onState(callback) {
  report = callback;
}

// The time of the service, in seconds.
export function now() {
  return (Date.now() + aheadMs) / 1000;
}

// Look at a path, and show its answer, unless a later look has begun. The state says what is wrong; what was shown stays.
export async function look(path, show) {
  const [name] = path.split("?");
  const own = Symbol(name);
  looks.set(name, own);
  let trouble = "";
  try {
    const found = await request(path, { forMs: LOOK_MS });
    if (looks.get(name) === own) show(found);
  } catch (error) {
    const said = error.reason === "unavailable" ? "Redis is unavailable" : error.message;
    trouble = error instanceof TypeError ? "Waymark has another release than this page; load it again" : `${said}; trying again`;
  }
  if (looks.get(name) !== own) return;
  troubles.set(name, trouble);
  const worst = [...troubles.values()].find(Boolean);
  report(worst || "live", Boolean(worst));
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
  const answer = await ask(path, options);
  return answer.json().catch(() => {
    throw new Error("The answer of Waymark cannot be read");
  });
}

// An answer that is no error. Throws an Error with the sentence of the service.
export async function ask(path, options) {
  const answer = await send(path, options);
  if (answer.ok) return answer;
  const { error, reason } = await errorOf(answer);
  throw Object.assign(new Error(error || `/${path.split("?")[0]} was answered with ${answer.status}`), { reason });
}

// The body of an error; that of a proxy may be anything.
async function errorOf(answer) {
  return (await answer.json().catch(() => null)) || {};
}

// The answer, once there is a token that it accepts. Throws where none comes.
export async function send(path, { isAct = false, forMs = ANSWER_MS, ...options }) {
  for (;;) {
    let answer;
    const sent = token;
    try {
      const headers = { ...options.headers, ...(sent ? { Authorization: `Bearer ${sent}` } : {}) };
      answer = await fetch(path, { signal: AbortSignal.timeout(forMs), ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("Waymark does not answer");
    }
    const date = Date.parse(answer.headers.get("Date"));
    if (date) aheadMs = date - Date.now();
    if (answer.status !== 401 && !(answer.status === 403 && isAct)) return answer;
    const why = answer.status === 403 ? (await errorOf(answer)).error : sent && "This token was refused.";
    if (!(await login(sent, why || "", isAct)) && isAct) throw new Error("No token was given, and nothing has changed.");
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
        store();
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
