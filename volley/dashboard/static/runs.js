// Table of all runs, and their curves over each other.
import { address, element, fetchJson, number, percent, table, when } from "./page.js";
import { chart, COLORS, redraw } from "./charts.js";

const OVERLAID = [["success", "Held-out success", "success", true], ["train", "Reward", "reward_mean", false],
  ["train", "Entropy", "entropy", false], ["train", "KL to the reference", "kl", false],
  ["train", "Tokens a second", "tokens_per_sec", false], ["train", "Log-probability difference", "logprob_abs_diff", false]];

export async function showRuns(main) {
  const runs = await fetchJson("/api/runs");
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
    for (const name of names) if (!loaded.has(name)) loaded.set(name, await fetchJson(`/api/runs/${address(name)}`));
    legend.replaceChildren(...names.map((name, i) => element("span", {}, swatch(i), name)));
    charts.replaceChildren(...OVERLAID.map(([kind, title, key, share]) => {
      const series = names.map((name, i) => {
        const curve = loaded.get(name).curves?.[kind];
        return { name, color: COLORS[i % COLORS.length], steps: curve?.step ?? [], values: curve?.columns[key] ?? [] };
      }).filter((one) => one.values.some((value) => value !== null));
      return series.length ? chart(title, series, { percent: share }) : null;
    }).filter(Boolean));
  }

  const rows = runs.map((run) => {
    const box = element("input", { type: "checkbox", "aria-label": `Show the curves of ${run.name}`, onchange: (event) => {
      if (event.target.checked) chosen.add(run.name); else chosen.delete(run.name);
      draw();
    } });
    box.checked = chosen.has(run.name);
    const state = run.problem ? element("span", { class: "bad", title: run.problem }, "refused") : run.state;
    return [box, element("a", { href: `#/run/${address(run.name)}` }, run.name), state,
      `${number(run.step)}${run.max_steps ? ` / ${run.max_steps}` : ""}`, percent(run.success), number(run.reward),
      run.env, run.algorithm, run.model, run.origin ? `${run.origin.run ?? ""}@${run.origin.version ?? ""}` : "–", when(run.created)];
  });
  const headings = ["curves", "run", "state", { text: "step", number: true }, { text: "held-out success", number: true },
    { text: "reward", number: true }, "environment", "algorithm", "model", "origin", "started (UTC)"];
  main.replaceChildren(element("h1", {}, "Runs"), table(headings, rows), element("h2", {}, "Curves of the marked runs"), legend, charts);
  await draw();
  const onTheme = () => redraw(charts);
  addEventListener("theme", onTheme);
  addEventListener("resize", onTheme);
  return () => { removeEventListener("theme", onTheme); removeEventListener("resize", onTheme); };
}

export function swatch(i) {
  const mark = element("i");
  mark.style.background = COLORS[i % COLORS.length];
  return mark;
}
