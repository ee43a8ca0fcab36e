// The page's views, and which of them is shown. What a view needs comes from the service that serves this page.

import { look, onState } from "./service.js";
import { byId, setText } from "./shown.js";
import { startDrain } from "./drain.js";
import { showEngines } from "./engines.js";
import { showHealth, startFigures } from "./figures.js";
import { startPrompt, showShared } from "./prompt.js";
import { startActivity } from "./activity.js";
import { showContract } from "./contract.js";

const EVERY_MS = 2000;
const VIEWS = ["engines", "prompt", "activity", "api"];

function route() {
  const [name, words = ""] = location.hash.slice(1).split("?");
  const view = VIEWS.includes(name) ? name : "engines";
  for (const each of VIEWS) {
    byId(`${each}-view`).hidden = each !== view;
    const link = document.querySelector(`nav a[href="#${each}"]`);
    if (each === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("no-view").hidden = !name || view === name;
  setText(byId("no-view"), `There is no view #${name}. These are the engines.`);
  if (view === "prompt") showShared();
  if (view === "api") showContract(words);
}

let next = 0;
async function lookAgain() {
  clearTimeout(next);
  await look("workers", (found) => {
    showEngines(found);
    showHealth();
  });
  clearTimeout(next);
  next = setTimeout(lookAgain, EVERY_MS);
}

onState((text, isBad) => {
  const state = byId("state");
  setText(state, text);
  state.className = isBad ? "bad" : "";
});
addEventListener("hashchange", route);
route();
startPrompt();
startActivity();
startDrain(lookAgain);
startFigures();
lookAgain();
