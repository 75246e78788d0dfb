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
    answer = await fetch(path);
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
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
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
  return element("div", { class: "scroll" }, element("table", {},
    caption ? element("caption", { class: "soft" }, caption) : null,
    element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body)));
}

export function command(text) {
  const button = element("button", { type: "button", "aria-label": `Copy ${text}`, onclick: async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } }, "copy");
  return element("div", { class: "copy" }, element("code", {}, text), button);
}

// Control characters would move or hide text; they are shown as their code.
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g,
    (c) => `⟨${c.codePointAt(0).toString(16).padStart(2, "0")}⟩`);
}

export const address = (...parts) => parts.map(encodeURIComponent).join("/");

export function when(seconds) {
  return seconds ? new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") : "–";
}
