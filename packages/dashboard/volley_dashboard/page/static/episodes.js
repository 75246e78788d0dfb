// List of a run's archived episodes, with filters that are part of the address.
import { address, element, environmentName, fetchJson, number, percent, table, titled } from "./page.js";

const COLUMNS = [["step", "step", true], ["ticket", "ticket, sample", true], ["env", "environment"], ["task", "task"], ["answer", "last answer"],
  ["reward", "reward", true], ["success", "success"], ["end", "end"], ["sampled", "sampled", true], ["tokens", "tokens", true],
  ["turns", "turns", true], ["staleness", "stale", true], ["logprob", "log p", true], ["failures", "failed attempts"]];
const PAGE = 100;

export async function showEpisodes(main, run, query) {
  titled(run, "episodes");
  const results = element("div", {});
  const chosen = new Set();
  const form = filters(query);
  main.replaceChildren(element("h1", {}, "Episodes"), form, results);

  function go(changes) {
    for (const [key, value] of Object.entries(changes)) {
      if (value === "" || value === null || value === undefined) query.delete(key); else query.set(key, value);
    }
    history.replaceState(null, "", `#/run/${address(run)}/episodes?${query}`);
    return draw();
  }

  async function draw() {
    let found;
    do {
      const asked = new URLSearchParams(query);
      asked.set("limit", PAGE);
      found = await fetchJson(`/api/runs/${address(run)}/episodes?${asked}`);
      fill(form, found.choices, query);
      results.replaceChildren(...environments(found.environments), ...show(found));
    } while (found.waiting > 0 && results.isConnected);
  }

  function show(found) {
    const offset = Number(query.get("offset") || 0);
    const sort = query.get("sort") || "step";
    const descending = query.get("descending") !== "false";
    const headings = [{ text: "mark" }, ...COLUMNS.map(([key, text, isNumber]) => ({
      number: isNumber, answer: key === "answer", text,
      content: key === "answer" ? null : element("button", { type: "button", "aria-label": `Sort by ${text}`, onclick: () => go({ sort: key, descending: key === sort ? String(!descending) : "true", offset: null }) },
        `${text}${key === sort ? (descending ? " ↓" : " ↑") : ""}`),
    }))];
    const rows = found.rows.map((row) => {
      const reference = `${row.version}.${row.ticket}.${row.sample}`;
      const box = element("input", { type: "checkbox", "aria-label": `Compare ticket ${row.ticket}, sample ${row.sample}`, onchange: (event) => {
        if (event.target.checked) chosen.add(reference); else chosen.delete(reference);
        compare.disabled = chosen.size < 2;
        compare.textContent = `Show ${chosen.size || ""} side by side`;
      } });
      box.checked = chosen.has(reference);
      return [box, ...COLUMNS.map(([key]) => cell(row, key))];
    });
    const compare = element("button", { type: "button", disabled: chosen.size < 2, onclick: () => { location.hash = `#/run/${address(run)}/ticket/${address([...chosen].join(","))}`; } }, "Show side by side");
    const exported = new URLSearchParams([...query].filter(([key]) => !["sort", "descending", "offset"].includes(key)));
    const damaged = Object.entries(found.damaged).map(([name, why]) => element("p", { class: "bad" }, `${name} is left out: ${why}`));
    const download = (kind, text) =>
      element("a", { href: `/api/runs/${address(run)}/episodes.${kind}?${exported}`, download: `episodes.${kind}` }, text);
    const more = element("div", { class: "row" },
      element("button", { type: "button", disabled: offset === 0, onclick: () => go({ offset: Math.max(0, offset - PAGE) || null }) }, "← newer"),
      element("span", {}, found.total ? `${number(Math.min(offset + 1, found.total))}–${number(Math.min(offset + PAGE, found.total))} of ${number(found.total)}` : [...query].length ? "No episode meets the filters" : "No episode is archived yet"),
      element("button", { type: "button", disabled: offset + PAGE >= found.total, onclick: () => go({ offset: offset + PAGE }) }, "older →"),
      compare, download("jsonl", "export as JSON lines"), found.parquet ? download("parquet", "as Parquet") : null,
      found.waiting ? element("span", { class: "soft" }, `reading ${found.waiting} more steps…`) : null);
    return [...damaged, more, ...(rows.length ? [table(headings, rows, "Episodes")] : [])];
  }

  function cell(row, key) {
    if (key === "ticket") return element("a", { href: `#/run/${address(run)}/ticket/${address(`${row.version}.${row.ticket}.${row.sample}`)}` }, `${row.ticket} · ${row.sample}`);
    if (key === "success") return element("span", { class: row.success ? "good" : "soft" }, row.success ? "yes" : "no");
    if (key === "step") return row.undone ? element("s", { title: "undone after a crash" }, String(row.step)) : String(row.step);
    if (key === "env") return element("span", { title: row.env }, environmentName(row.env));
    if (key === "task") return element("span", { title: row.task }, String(row.task).replace(/@[0-9a-f]{12}$/, ""));
    if (key === "answer") return element("span", { class: "answer", title: row.answer }, row.answer || "–");
    return typeof row[key] === "number" ? number(row[key]) : row[key] || "–";
  }

  form.addEventListener("change", (event) => go({ [event.target.name]: event.target.value, offset: null }));
  form.addEventListener("submit", (event) => event.preventDefault());
  await draw();
  return null;
}

function filters(query) {
  const input = (name, text, type = "number", width = "6.5rem") => {
    const made = element("input", { name, type, value: query.get(name) || "", step: type === "number" ? "any" : null });
    made.style.width = width;
    return element("label", {}, text, made);
  };
  const select = (name, text, options = [["", "all"]]) => element("label", {}, text,
    element("select", { name }, ...options.map(([value, shown]) => element("option", { value, selected: query.get(name) === value }, shown))));
  const few = [input("text", "search", "search", "12rem"), select("env", "environment"), select("end", "end"),
    select("success", "success", [["", "all"], ["true", "yes"], ["false", "no"]])];
  const more = [select("failed", "failed attempts", [["", "all"], ["true", "some"], ["false", "none"]]),
    input("ticket", "ticket"), input("step_min", "step from"), input("step_max", "to"), input("reward_min", "reward from"), input("reward_max", "to"),
    input("tokens_min", "tokens from"), input("staleness_min", "staleness from")];
  const isSet = ["failed", "ticket", "step_min", "step_max", "reward_min", "reward_max", "tokens_min", "staleness_min"].some((name) => query.has(name));
  return element("form", { "aria-label": "Filters" }, element("div", { class: "row" }, ...few),
    element("details", { open: isSet }, element("summary", {}, "More filters"), element("div", { class: "row" }, ...more)));
}

function fill(form, choices, query) {
  for (const name of ["env", "end"]) {
    const select = form.elements[name];
    const known = new Set([...select.options].map((one) => one.value));
    for (const value of choices[name]) if (!known.has(value)) select.append(element("option", { value, selected: query.get(name) === value }, value));
  }
}

// Ends and failed attempts of the listed episodes, by environment.
function environments(rows) {
  if (rows.length === 0) return [];
  const shares = (counts, all) => Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([name, n]) => `${name} ${percent(n / all)}`).join(", ");
  const counts = (found) => Object.entries(found).sort((a, b) => b[1] - a[1]).map(([name, n]) => `${name} ${number(n)}`).join(", ");
  const cells = rows.map((row) => [element("span", { title: row.env }, environmentName(row.env)), number(row.episodes), percent(row.success), number(row.reward), shares(row.ends, row.episodes), counts(row.failures) || "–"]);
  return [table(["environment", { text: "episodes", number: true }, { text: "success", number: true }, { text: "mean reward", number: true },
    { text: "ends", wrap: true }, { text: "failed attempts", wrap: true }], cells)];
}
