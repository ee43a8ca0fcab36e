// What the contract offers beside what it says: a field that finds an operation, and a button beside each example, which sends it to
// this Waymark and shows the answer.

// An answer may be long, or never end.
const SHOWN_MAX = 65536;
// How wide a value of an answer may be before it gets several lines, and how high a body is before it scrolls.
const WIDTH = 96;
const HEIGHT_MAX = 240;

// What the examples were recorded with.
const MODEL = "llama";
const BLOCK_SIZE = 4;
// What is asked for in place of the recorded tokens, which are less than a block of most engines: what prompts of `waymark demo` begin with.
const TOKENS = Array.from({ length: 160 }, (_, i) => 1000 + i).join(", ");

// Of all operations, those stay in sight whose method, path or sentence has the words; if none has them, those that name them anywhere.
export function offerToFind(page) {
  const field = make("input", { type: "search", placeholder: "path or word", "aria-label": "Find an operation", autocomplete: "off" });
  const count = make("span", { role: "status" });
  page.querySelector(".find").append(field, count);
  const lines = [...page.querySelectorAll("nav li")];
  const sections = [...page.querySelectorAll("section")];
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const having = (nodes) => nodes.map((node) => words.every((word) => node.textContent.toLowerCase().includes(word)));
    const inLines = having(lines);
    const found = inLines.includes(true) ? inLines : having(sections);
    for (const nodes of [lines, sections]) nodes.forEach((node, i) => (node.hidden = !found[i]));
    for (const list of page.querySelectorAll("nav ul")) list.hidden = list.previousElementSibling.hidden = ![...list.children].some((line) => !line.hidden);
    count.textContent = words.length ? `${found.filter(Boolean).length} of ${lines.length}` : "";
  });
}

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
  content.addEventListener("input", () => fit(content));
  content.hidden = body === undefined;
  const note = make("p", { role: "status" }, changes === undefined ? "" : "This request changes something. Look at it, and send it again.");
  const answer = make("pre", { tabindex: "0", "aria-label": `answer to ${named}` });
  answer.hidden = true;
  place.prepend(target, content);
  place.append(note, answer);
  fit(content);
  const code = place.previousElementSibling.querySelector("code");
  let stop = null;
  const go = async () => {
    if (stop) return stop.abort();
    stop = new AbortController();
    button.textContent = "Stop";
    answer.hidden = false;
    answer.textContent = "";
    code.textContent = command(method, target.value, content.hidden ? undefined : content.value);
    const headers = method === "GET" ? {} : { "Content-Type": "application/json" };
    const options = { method, headers, signal: stop.signal, ...(content.hidden ? {} : { body: content.value }) };
    try {
      const begun = performance.now();
      const found = await send(target.value.replace(/^\/+/, ""), options);
      const said = found.headers.get("X-Waymark-Note");
      note.textContent = `${found.status}, after ${Math.round(performance.now() - begun)} ms${said ? `. ${said}` : ""}`;
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
  fit(content);
  go();
}

// As high as what is in it.
function fit(content) {
  content.style.height = "auto";
  if (content.scrollHeight) content.style.height = `${Math.min(HEIGHT_MAX, content.scrollHeight + 2)}px`;
}

// The command that sends the same.
function command(method, path, body) {
  const quoted = (text) => `'${text.replaceAll("'", `'"'"'`)}'`;
  const url = new URL(path.replace(/^\/+/, ""), location.href).href;
  const verb = method === "GET" || (method === "POST" && body !== undefined) ? "" : `-X ${method} `;
  const sent = body === undefined ? "" : ` -H 'Content-Type: application/json' \\\n  -d ${quoted(body)}`;
  return `curl ${verb}${/[?&;*]/.test(url) ? quoted(url) : url}${sent}`;
}

// An example that only reads asks for a model that is registered here: the one with the most engines. It asks for some blocks.
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
    return text.replace(named, (_, before) => before + written).replaceAll(`"block_size": ${BLOCK_SIZE}`, `"block_size": ${size}`)
      .replace(/("token_ids": )\[[\d,\s]*\]/g, `$1[${TOKENS}]`);
  } catch {
    return text; // without a token there is no list, and the example stays as it was recorded
  }
}

async function read(found, answer) {
  if (!found.body) return;
  const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    answer.textContent += value;
    if (answer.textContent.length > SHOWN_MAX) {
      answer.textContent = `${answer.textContent.slice(0, SHOWN_MAX)}\n… the rest is not shown`;
      return reader.cancel();
    }
  }
  if (/^application\/json\b/.test(found.headers.get("Content-Type"))) answer.textContent = indented(answer.textContent);
}

// JSON with short values on one line. Numbers stay as they are written: a hash is larger than a number of this language.
function indented(text) {
  const words = text.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g) || [];
  let at = 0;
  const value = (indent) => {
    const opening = words[at++];
    if (opening !== "{" && opening !== "[") return opening;
    const closing = opening === "{" ? "}" : "]";
    const items = [];
    while (words[at] !== closing) {
      if (words[at] === ",") at++;
      const name = opening === "{" ? `${words[at]}: ` : "";
      if (name) at += 2;
      items.push(name + value(`${indent}  `));
    }
    at++;
    const line = `${opening}${items.join(", ")}${closing}`;
    if (indent.length + line.length <= WIDTH) return line;
    return `${opening}\n${items.map((each) => `${indent}  ${each}`).join(",\n")}\n${indent}${closing}`;
  };
  try {
    JSON.parse(text);
    return value("");
  } catch {
    return text; // it is no JSON, or deeper than this language can go
  }
}
