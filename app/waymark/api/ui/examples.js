// A button beside each example of the contract, which sends it to this Waymark and shows the answer.

// An answer may be long, or never end.
const SHOWN_MAX = 65536;

// What the examples were recorded with.
const MODEL = "llama";
const BLOCK_SIZE = 4;

// ``send`` is a fetch that knows the token, if there is one.
export function offerToSend(page, send) {
  for (const place of page.querySelectorAll("div.send")) {
    const button = make("button", { type: "button", "aria-label": `Send ${place.dataset.method} ${place.dataset.path}` }, "Send");
    button.addEventListener("click", () => open(place, button, send), { once: true });
    place.append(button);
  }
}

function make(tag, attributes, text = "") {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// Show what would be sent, so that it can be changed. What changes nothing in Waymark is sent at once.
async function open(place, button, send) {
  const { method, path, body, changes } = place.dataset;
  const named = `${method} ${path}`;
  const target = make("input", { "aria-label": `path of ${named}`, autocomplete: "off", spellcheck: "false" });
  target.value = path;
  const content = make("textarea", { "aria-label": `body of ${named}`, rows: Math.min(12, (body || "").split("\n").length), spellcheck: "false" });
  content.value = body || "";
  content.hidden = body === undefined;
  const note = make("p", { role: "status" }, changes === undefined ? "" : "This request changes something. Look at it, and send it again.");
  const answer = make("pre", { tabindex: "0", "aria-label": `answer to ${named}` });
  answer.hidden = true;
  place.prepend(target, content);
  place.append(note, answer);
  let stop = null;
  const go = async () => {
    if (stop) return stop.abort();
    stop = new AbortController();
    button.textContent = "Stop";
    answer.hidden = false;
    answer.textContent = "";
    const headers = method === "GET" ? {} : { "Content-Type": "application/json" };
    const options = { method, headers, signal: stop.signal, ...(content.hidden ? {} : { body: content.value }) };
    try {
      const begun = performance.now();
      const found = await send(target.value.replace(/^\/+/, ""), options);
      note.textContent = `${found.status}, after ${Math.round(performance.now() - begun)} ms`;
      await read(found, answer);
    } catch (error) {
      if (error.name !== "AbortError") note.textContent = error.message;
    }
    stop = null;
    button.textContent = "Send";
  };
  button.addEventListener("click", go);
  if (changes !== undefined) return;
  for (const field of [target, content]) field.value = await withModel(field.value, send);
  go();
}

// An example that only reads asks for a model that is registered here: the one with the most engines.
async function withModel(text, send) {
  const named = new RegExp(`("?\\bmodel(?:_?name)?"?[:=] ?"?)${MODEL}\\b`, "g");
  if (!named.test(text)) return text;
  try {
    const answer = await send("workers", {});
    const { publishers } = await answer.json();
    const counts = new Map();
    for (const { model_name: model } of publishers) counts.set(model, (counts.get(model) || 0) + 1);
    if (!counts.size || counts.has(MODEL)) return text;
    const [model] = [...counts].reduce((most, each) => (each[1] > most[1] ? each : most));
    const { block_size: size } = publishers.find((each) => each.model_name === model);
    const isPath = text.startsWith("/");
    const written = isPath ? encodeURIComponent(model) : JSON.stringify(model).slice(1, -1);
    return text.replace(named, (_, before) => before + written).replaceAll(`"block_size": ${BLOCK_SIZE}`, `"block_size": ${size}`);
  } catch {
    return text; // without a token there is no list, and the example stays as it was recorded
  }
}

async function read(found, answer) {
  if (!found.body) return;
  const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    answer.textContent += value;
    if (answer.textContent.length > SHOWN_MAX) {
      answer.textContent = `${answer.textContent.slice(0, SHOWN_MAX)}\n… the rest is not shown`;
      return reader.cancel();
    }
  }
}
