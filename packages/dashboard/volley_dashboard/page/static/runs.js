// Table of all runs, and their curves over each other.
import { address, duration, element, environmentName, fetchJson, number, patch, percent, sparkline, STATE_COLOURS, table, titled, when } from "./page.js";
import { axis, chart, COLORS, controls, redraw } from "./charts.js";

const AGAIN_MS = 5000;

const OVERLAID = [["success", "Held-out success", "success", true], ["train", "Reward", "reward_mean", false],
  ["train", "Entropy", "entropy", false], ["train", "KL to the reference", "kl", false],
  ["train", "Tokens/s", "tokens_per_sec", false], ["train", "Log-prob mismatch, nats", "logprob_abs_diff", false]];
const COLUMNS = ["time", "tokens", ...OVERLAID.map(([, , key]) => key)].join();

export async function showRuns(main) {
  titled("Runs");
  let runs = await fetchJson("/api/runs");
  if (runs.length === 0) {
    main.replaceChildren(element("h1", {}, "Runs"), element("p", {}, "There is no run in this folder yet."),
      element("p", { class: "soft" }, "Start one with `volley quickstart`."));
    return null;
  }
  const charts = element("div", { class: "cards" });
  const chosen = new Set(runs.slice(0, Math.min(2, runs.length)).map((run) => run.name));
  const loaded = new Map();
  const legend = element("div", { class: "legend" });

  async function draw() {
    const names = runs.map((run) => run.name).filter((name) => chosen.has(name));
    for (const name of names) if (!loaded.has(name)) loaded.set(name, await fetchJson(`/api/runs/${address(name)}?columns=${COLUMNS}`));
    const isDrawn = (name) => OVERLAID.some(([kind, , key]) => loaded.get(name).curves?.[kind]?.columns[key]?.some((value) => value !== null));
    const empty = names.filter((name) => !isDrawn(name));
    legend.replaceChildren(...names.map((name, i) => (isDrawn(name) ? element("span", {}, swatch(i), name) : null)).filter(Boolean),
      ...(names.length === empty.length ? [element("span", {}, names.length ? "The marked runs have no curves yet." : "No run is marked.")] : []));
    charts.replaceChildren(...OVERLAID.map(([kind, title, key, share]) => {
      const series = names.map((name, i) => {
        const curve = loaded.get(name).curves?.[kind];
        return { name, color: COLORS[i % COLORS.length], steps: curve?.step ?? [], values: curve?.columns[key] ?? [], at: axis(loaded.get(name).curves?.train) };
      }).filter((one) => one.values.some((value) => value !== null));
      return series.length ? chart(title, series, { percent: share }) : null;
    }).filter(Boolean));
  }

  const columns = [["curves"], ["run", "name"], ["state", "state"], ["curve"], ["step", "step"], ["held-out success", "success"], ["reward", "reward"], ["environment", "env"],
    ["algorithm", "algorithm"], ["model", "model"], ["origin"], ["duration", "elapsed_s"], ["started (UTC)", "created"]];
  const numeric = new Set(["step", "success", "reward", "elapsed_s"]);
  const order = { key: "created", descending: true, text: "" };
  const box = (run) => {
    const made = element("input", { type: "checkbox", "aria-label": `Show the curves of ${run.name}`, onchange: (event) => {
      if (event.target.checked) chosen.add(run.name); else chosen.delete(run.name);
      draw();
    } });
    made.checked = chosen.has(run.name);
    return made;
  };
  const cells = (run) => [box(run), element("a", { href: `#/run/${address(run.name)}` }, run.name),
    element("span", { class: STATE_COLOURS[run.state], title: run.problem ?? run.failed }, run.problem ? "not read" : run.state), sparkline(run.recent),
    `${number(run.step)}${run.max_steps ? ` / ${number(run.max_steps)}` : ""}`, percent(run.success), number(run.reward),
    element("span", { title: run.env }, environmentName(run.env)), run.algorithm, run.model, run.origin ? `${run.origin.run ?? ""}@${run.origin.version ?? ""}` : "–",
    duration(run.elapsed_s), when(run.created)];
  const list = element("div", {});
  function fill() {
    const words = order.text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = runs.filter((run) => words.every((word) => [run.name, run.state, run.env, run.algorithm, run.model].join(" ").toLowerCase().includes(word)));
    const rank = (run) => run[order.key] ?? "";
    found.sort((a, b) => (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : 0) * (order.descending ? -1 : 1));
    const headings = columns.map(([text, key]) => (key ? { number: numeric.has(key), content: element("button", { type: "button", "aria-label": `Sort by ${text}`, onclick: () => {
      order.descending = order.key === key ? !order.descending : true;
      order.key = key;
      fill();
    } }, `${text}${order.key === key ? (order.descending ? " ↓" : " ↑") : ""}`) } : { text }));
    patch(list, found.length ? table(headings, found.map(cells), "Runs") : element("p", { class: "soft" }, "No run has these words."));
  }
  fill();
  const filter = element("label", {}, "filter", element("input", { type: "search", placeholder: "name, state, environment, model", oninput: (event) => { order.text = event.target.value; fill(); } }));
  main.replaceChildren(element("h1", {}, "Runs"), element("div", { class: "row" }, filter), list,
    element("h2", {}, "Curves of the marked runs"), controls(draw), legend, charts);
  await draw();
  const onTheme = () => redraw(charts);
  addEventListener("theme", onTheme);
  addEventListener("resize", onTheme);
  const again = setInterval(async () => {
    if (document.hidden) return;
    runs = await fetchJson("/api/runs").catch(() => runs);
    fill();
  }, AGAIN_MS);
  return () => { clearInterval(again); removeEventListener("theme", onTheme); removeEventListener("resize", onTheme); };
}

export function swatch(i) {
  const mark = element("i");
  mark.style.background = COLORS[i % COLORS.length];
  return mark;
}
