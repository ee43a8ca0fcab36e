// Elements from values. Names come from strangers: they are text, never markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : plain(child))));
  return made;
}

// A value as one line of text in which nothing moves or hides the text next to it.
export function plain(value) {
  return String(value).replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cn}\u2028\u2029]/gu, "\uFFFD");
}

// Change the text or an attribute of an element, where it is another one.
export function setText(node, value) {
  const text = plain(value);
  if (node.textContent !== text) node.textContent = text;
}
export function setAttribute(node, name, value) {
  const text = plain(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

// Give an element these children in this order, and move only those that are not in their place. The focus stays.
export function arrange(parent, wanted) {
  const focused = document.activeElement;
  wanted.forEach((node, i) => {
    if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] || null);
  });
  while (parent.children.length > wanted.length) parent.lastElementChild.remove();
  if (focused !== document.activeElement && focused.isConnected) focused.focus();
}

// A canvas has no light-dark(): an element resolves a colour, once for each theme.
const probe = element("span", { hidden: "" });
document.documentElement.append(probe);
const colours = new Map();
export function painted(name) {
  if (!colours.has(name)) {
    probe.style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}

// Call back when the theme is another one, to paint again.
export function onTheme(callback) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    colours.clear();
    callback();
  });
}

export function seconds(value) {
  if (value === null) return "";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${Math.round(value / 3600)} h`;
}

export const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function several(count, name) {
  return `${count} ${name}${count === 1 ? "" : "s"}`;
}

// A canvas as sharp as the screen, for what the text next to it says too.
export function canvas(width, height) {
  const made = element("canvas", { "aria-hidden": "true" });
  made.style.width = `${width}px`;
  made.style.height = `${height}px`;
  return [made, sharpen(made, width, height)];
}

// Give a canvas its pixels, which are empty. Without them, when its width is 0, it keeps its place in the page.
export function sharpen(made, width, height) {
  const scale = devicePixelRatio || 1;
  made.width = Math.round(width * scale);
  made.height = Math.round(height * scale);
  const context = made.getContext("2d");
  context.scale(scale, scale);
  return context;
}
