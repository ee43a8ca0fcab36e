// A button beside each example of the contract, which sends it to this Waymark and shows the answer.

// An answer may be long, or never end.
const SHOWN_MAX = 65536;

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
function open(place, button, send) {
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
  if (changes === undefined) go();
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
