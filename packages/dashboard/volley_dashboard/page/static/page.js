// Helpers of all pages. Text from a run only ever becomes a text node.

export class Problem extends Error {
  constructor(message, status = 0, hint = "") {
    super(message);
    this.status = status;
    this.hint = hint;
  }
}

export async function fetchJson(path) {
  let answer;
  try {
    answer = await (takeEarly(path) ?? fetch(path));
  } catch {
    throw new Problem("the dashboard does not answer", 0, "Start it again with `volley dashboard`.");
  }
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Problem(body.detail || answer.statusText, answer.status, body.hint || "");
  return body;
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made[key] = value;
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, typeof value === "string" && key !== "value" ? visible(value) : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (typeof child === "string" ? visible(child) : child)));
  return made;
}

// Colour of a state; a state without one is neutral.
export const STATE_COLOURS = { running: "good", failed: "bad", refused: "bad", unreadable: "bad", wedged: "bad", stopped: "warn", waiting: "warn" };

const KEPT_IN_STEP = ["onclick", "onchange", "oninput", "checked", "disabled"];

// Make a node's children like the wanted ones and keep those that are alike, with focus, selection, scroll place and what
// the reader has opened. Children with an id are found by it, others by their place.
export function patch(parent, ...wanted) {
  const named = new Map([...parent.children].filter((one) => one.id).map((one) => [one.id, one]));
  let at = parent.firstChild;
  for (const child of wanted.flat().filter(Boolean)) {
    const kept = child === at ? at : child.id ? named.get(child.id) : at && !at.id && at.nodeName === child.nodeName ? at : null;
    if (kept && kept !== at) parent.insertBefore(kept, at);
    if (kept && kept !== child) renew(kept, child);
    if (kept) at = kept.nextSibling; else parent.insertBefore(child, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function renew(kept, wanted) {
  if (kept.nodeType === Node.TEXT_NODE) {
    if (kept.nodeValue !== wanted.nodeValue) kept.nodeValue = wanted.nodeValue;
    return;
  }
  for (const { name } of [...kept.attributes]) if (name !== "open" && !wanted.hasAttribute(name)) kept.removeAttribute(name);
  for (const { name, value } of wanted.attributes) if (name !== "open" && kept.getAttribute(name) !== value) kept.setAttribute(name, value);
  for (const name of KEPT_IN_STEP) if (name in wanted) kept[name] = wanted[name];
  patch(kept, ...wanted.childNodes);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(digits + 1)));
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

export function table(headings, rows, caption) {
  const head = headings.map((one) => element("th", { scope: "col", class: one.number ? "number" : null }, one.content ?? one.text ?? one));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell, i) => {
    const heading = headings[i];
    return element("td", { class: heading.number ? "number" : heading.wrap ? "wrap" : null }, cell ?? "–");
  })));
  return element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption || "table" }, element("table", {},
    caption ? element("caption", { class: "soft" }, caption) : null,
    element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)));
}

// `copy` is false if a name in the command holds control characters: pasted, it would not be what it looks like.
export function command({ text, copy }) {
  if (!copy) return element("p", { class: "soft" }, element("code", {}, text), " – a name here holds control characters; type the command yourself");
  const button = element("button", { type: "button", "aria-label": `Copy ${text}`, onclick: async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } }, "copy");
  return element("div", { class: "copy" }, element("code", {}, text), button);
}

// Control characters would move or hide text; they are shown as their code.
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\u{e0000}-\u{e007f}]|\p{Cs}/gu,
    (c) => `⟨${c.codePointAt(0).toString(16).padStart(2, "0")}⟩`);
}

export const address = (...parts) => parts.map(encodeURIComponent).join("/");

export function when(seconds) {
  return seconds ? new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") : "–";
}

// Name of an environment without the digest that the name of a user's file has; its version stays if it is not the first.
export const environmentName = (name) => String(name ?? "").replace(/-[0-9a-f]{8}(?=@|$)/, "").replace(/@1$/, "");

export function titled(...parts) {
  document.title = visible([...parts, "Volley"].filter(Boolean).join(" · "));
}

export function duration(seconds) {
  if (!seconds) return "–";
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// A curve as small as a word.
export function sparkline(values) {
  if (values.length < 2) return "–";
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, i) => `${(i * 80) / (values.length - 1)},${19 - (18 * (value - low)) / (high - low || 1)}`).join(" ");
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of [["viewBox", "0 0 80 20"], ["width", "80"], ["height", "20"], ["aria-hidden", "true"]]) made.setAttribute(key, value);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  for (const [key, value] of [["points", points], ["fill", "none"], ["stroke", "currentColor"], ["stroke-width", "1.4"]]) line.setAttribute(key, value);
  made.append(line);
  return made;
}
