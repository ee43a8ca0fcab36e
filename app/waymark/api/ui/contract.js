// The contract, which GET /docs shows: where reads are protected, a link to it would be refused, as it carries no token.

import { offerToFind, offerToSend } from "./examples.js";
import { ask, send } from "./service.js";
import { byId } from "./shown.js";

let shown = null;

// A link to the part that was gone to before changes no address, so nothing else would follow it.
byId("contract").addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#api?"]');
  if (link && link.getAttribute("href") === location.hash) showContract(location.hash.split("?")[1]);
});

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
  const answer = await ask("docs", {});
  // Without its head: this page has its own styles.
  const text = await answer.text();
  const page = new DOMParser().parseFromString(text.slice(text.indexOf("<body>")), "text/html");
  for (const link of page.querySelectorAll('a[href^="#"]')) link.setAttribute("href", `#api?${link.getAttribute("href").slice(1)}`);
  byId("contract").replaceChildren(page.querySelector(".find"), page.querySelector("nav"), ...page.querySelector("main").childNodes);
  offerToFind(byId("contract"));
  offerToSend(byId("contract"), (path, options) => send(path, { ...options, isAct: true }));
}
