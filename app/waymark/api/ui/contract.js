// The contract, which GET /docs shows: where reads are protected, a link to it would be refused, as it carries no token.

import { offerToSend } from "./examples.js";
import { send } from "./service.js";
import { byId } from "./shown.js";

let shown = null;

// Show the contract, and go to one of its parts.
export async function showContract(anchor) {
  shown ||= load();
  try {
    await shown;
    byId("contract-error").textContent = "";
    document.getElementById(anchor)?.scrollIntoView();
  } catch (error) {
    shown = null;
    byId("contract-error").textContent = error.message;
  }
}

async function load() {
  const answer = await send("docs", {});
  if (!answer.ok) throw new Error(`GET /docs was answered with ${answer.status}`);
  // Without its head: this page has its own styles.
  const text = await answer.text();
  const page = new DOMParser().parseFromString(text.slice(text.indexOf("<body>")), "text/html");
  for (const link of page.querySelectorAll('a[href^="#"]')) link.setAttribute("href", `#api?${link.getAttribute("href").slice(1)}`);
  byId("contract").replaceChildren(page.querySelector("nav"), ...page.querySelector("main").childNodes);
  offerToSend(byId("contract"), (path, options) => send(path, { ...options, isAct: true }));
}
