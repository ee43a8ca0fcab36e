// Elements from values. Names come from strangers: they are text, never markup.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : plain(child))));
  return made;
}

// A value as one line of text in which nothing moves or hides what is beside it.
export function plain(value) {
  return String(value).replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cn}\u2028\u2029]/gu, "\uFFFD");
}


// A canvas has no light-dark(): an element resolves it.
const probe = element("span", { hidden: "" });
document.documentElement.append(probe);
export function painted(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

export function seconds(value) {
  if (value === null) return "";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${Math.round(value / 3600)} h`;
}

// A canvas as sharp as the screen.
export function canvas(width, height, label) {
  const made = element("canvas", { role: "img", "aria-label": plain(label) });
  const scale = devicePixelRatio || 1;
  made.width = Math.round(width * scale);
  made.height = Math.round(height * scale);
  made.style.width = `${width}px`;
  made.style.height = `${height}px`;
  const context = made.getContext("2d");
  context.scale(scale, scale);
  return [made, context];
}
