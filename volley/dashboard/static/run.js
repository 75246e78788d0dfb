// One run: advice, curves, services, ledger, commands.
import { address, command, element, fetchJson, number, percent, table } from "./page.js";
import { chart, COLORS, redraw } from "./charts.js";

const SECTIONS = [
  ["Learning", [["Reward", "reward_mean"], ["Success in training", "success"], ["Loss", "loss"], ["Gradient norm", "grad_norm"],
    ["Entropy", "entropy"], ["KL to the reference", "kl"]]],
  ["Off-policy", [["Staleness, mean", "staleness_mean"], ["Clipped tokens", "clip_fraction"], ["Effective share of tokens", "effective_share"],
    ["Rejected tokens", "rejected_fraction"], ["Engine against trainer, nats", "logprob_abs_diff_current"],
    ["Groups without variance", "zero_variance_groups"]]],
  ["Speed", [["Tokens trained a second", "tokens_per_sec"], ["Seconds a step", "step_s"], ["Seconds waited for groups", "wait_s"],
    ["Share of computed positions that are tokens", "packing_efficiency"], ["Tokens a step", "tokens"], ["Episodes cut by a limit", "truncation_rate"]]],
];

export async function showRun(main, live, run) {
  const path = `/api/runs/${address(run)}`;
  const body = element("div", {});
  const services = element("div", {}, element("p", { class: "soft" }, "The run is not being worked on."));
  main.replaceChildren(body);

  async function draw() {
    const found = await fetchJson(path);
    const open = new Set([...body.querySelectorAll("details[open]")].map((one) => one.id));
    body.replaceChildren(...parts(found, run, services));
    for (const id of open) body.querySelector(`#${id}`)?.setAttribute("open", "");
    return found;
  }
  if ((await draw()).summary.problem) return null;
  const source = new EventSource(`${path}/events`);
  source.addEventListener("records", () => draw().catch(() => {}));
  source.addEventListener("fleet", (event) => showFleet(services, live, JSON.parse(event.data)));
  source.onerror = () => { live.textContent = "the dashboard does not answer"; };
  const onTheme = () => redraw(body);
  addEventListener("theme", onTheme);
  addEventListener("resize", onTheme);
  return () => { source.close(); removeEventListener("theme", onTheme); removeEventListener("resize", onTheme); };
}

function parts(found, run, services) {
  const { summary } = found;
  const made = [element("h1", {}, run)];
  if (summary.problem) return [...made, element("p", { class: "bad" }, `This folder is not read: ${summary.problem}`)];
  if (summary.state === "unreadable") {
    made.push(element("p", { class: "bad" }, "run.json cannot be read: it is damaged, or another version of Volley wrote it. Settings, environment and model are unknown."));
  }
  const { curves } = found;
  made.push(tiles(summary, found), ...advice(found.advice));
  made.push(element("h2", {}, "Success on held-out tasks"), success(curves.success));
  for (const [title, metrics] of SECTIONS) {
    const cards = metrics.map(([name, key]) => card(name, curves.train, key)).filter(Boolean);
    if (cards.length) made.push(element("h2", {}, title), element("div", { class: "cards" }, ...cards));
  }
  made.push(...others(curves), element("h2", {}, "Services"), services, ...handovers(found.handovers), ...ledger(found), ...commands(summary), settings(found));
  return made;
}

function tiles(summary, found) {
  const tile = (name, value) => element("div", { class: "tile" }, element("b", {}, value), element("span", {}, name));
  return element("div", { class: "tiles" }, tile("state", summary.state),
    tile("step", `${number(summary.step)}${summary.max_steps ? ` / ${summary.max_steps}` : ""}`),
    tile("held-out success", percent(summary.success)), tile("reward", number(summary.reward)),
    tile("environment", summary.env || "–"), tile("algorithm", summary.algorithm || "–"), tile("version", found.version ?? "–"));
}

function advice(list) {
  if (list.length === 0) return [];
  return [element("h2", {}, "Health"), ...list.map((one) => element("div", { class: `advice ${one.level}` },
    element("p", {}, element("b", {}, one.level === "warning" ? "Warning: " : "Note: "), one.text), element("p", { class: "soft" }, `What helps: ${one.help}`)))];
}

function success(curve) {
  if (curve.step.length === 0) return element("p", { class: "soft" }, "Nothing was evaluated yet.");
  const line = (key, extra) => ({ name: key, steps: curve.step, values: curve.columns[key], color: COLORS[0], ...extra });
  const edge = { dash: [2, 3], width: 0.8 };
  return chart("Success, with its 95 % interval", [line("success", {}), line("high", edge), line("low", edge)],
    { bands: [[2, 3, "rgba(42,127,106,.14)"]], height: 220, percent: true });
}

function card(name, curve, key, color = COLORS[0]) {
  const values = curve.columns[key];
  if (!values || values.every((value) => value === null)) return null;
  return chart(name, [{ name: key, steps: curve.step, values, color }]);
}

function others(curves) {
  const named = new Set(SECTIONS.flatMap(([, metrics]) => metrics.map(([, key]) => key)));
  const made = [];
  for (const [kind, title] of [["train", "All other metrics of steps"], ["eval", "All metrics of evaluations"], ["sft", "Supervised steps"]]) {
    const keys = Object.keys(curves[kind].columns).filter((key) => kind !== "train" || !named.has(key)).filter((key) => key !== "time");
    if (keys.length === 0) continue;
    const box = element("div", { class: "cards" });
    const details = element("details", { id: `all-${kind}` }, element("summary", {}, `${title} (${keys.length})`), box);
    details.addEventListener("toggle", () => {
      if (details.open && !box.childElementCount) box.append(...keys.map((key) => card(key, curves[kind], key)).filter(Boolean));
    });
    made.push(details);
  }
  return made.length ? [element("h2", {}, "More"), ...made] : [];
}

// A fact that the first service reports that knows it.
function fact(fleet, key) {
  return fleet.services.map((one) => one.facts?.[key]).find((value) => value !== undefined && value !== null);
}

function pause(one, facts) {
  if (facts.internal_state?.paused) return "decoding is paused";
  return facts.paused || facts.state === "paused" ? "paused on request" : null;
}

function memory(one, facts) {
  if (one.kind === "trainer") return Object.entries(facts.memory || {}).map(([name, mib]) => `${name} ${number(Math.round(mib))} MiB`).join(", ");
  const { free_kv_tokens: free, cached_kv_tokens: cached } = facts.internal_state || {};
  return free === undefined || !facts.max_total_tokens ? "" : `${percent((free + (cached ?? 0)) / facts.max_total_tokens)} of the key/value pool available`;
}

function queue(fleet) {
  const state = fact(fleet, "queue");
  if (!state || typeof state !== "object") return [];
  const tile = (name, value) => element("div", { class: "tile" }, element("b", {}, number(value)), element("span", {}, name));
  return [element("h2", {}, "Queue"), element("div", { class: "tiles" }, tile("groups that wait for the trainer", state.depth),
    tile("tickets in work, or to be issued again", state.leased), tile("oldest ticket that has not ended", Math.min(state.low + 1, state.issued)),
    tile("tickets issued", state.issued), tile("ended untrained", state.void), tile("poisoned entries kept", state.dead))];
}

// What the running episodes wait for, in a sentence.
function waits(fleet) {
  const counts = Object.entries(fact(fleet, "waits") || {}).filter(([, n]) => n > 0);
  const running = fact(fleet, "episodes_running");
  if (Array.isArray(fact(fleet, "waits")) || counts.length === 0 || !running) return [];
  const names = { rollout: "for the model's tokens", env: "for their environment", server: "for a server that may take them", teacher: "for the teacher" };
  const parts = counts.sort((a, b) => b[1] - a[1]).map(([on, n]) => `${number(n)} ${names[on] ?? `for ${on}`}`);
  return [element("p", {}, `Of ${number(running)} running episodes wait: ${parts.join(", ")}.`)];
}

function members(fleet) {
  const rows = (fact(fleet, "mixture") || []).map((one) => [one.env, element("span", { class: one.reason ? "warn" : null }, one.state), percent(one.share),
    number(one.groups), number(one.groups_failed), `${number(one.attempts_failed)} of ${number(one.attempts)}`, percent(one.success), number(one.reward_mean),
    one.reason ?? one.failing ?? "–"]);
  if (rows.length === 0) return [];
  return [element("h2", {}, "Environments"), table(["environment", "state", { text: "share", number: true }, { text: "groups", number: true },
    { text: "failed groups", number: true }, { text: "failed attempts", number: true }, { text: "success", number: true }, { text: "mean reward", number: true },
    { text: "trouble", wrap: true }], rows)];
}

const bytes = (n) => (n === null || n === undefined ? "–" : n >= 1e9 ? `${(n / 1e9).toFixed(2)} GB` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e3).toFixed(0)} kB`);
const took = (s) => (s === null || s === undefined ? "–" : s >= 1 ? `${s.toFixed(1)} s` : `${(1000 * s).toFixed(1)} ms`);

function handovers(list) {
  if (!list || list.length === 0) return [];
  const rows = list.map((one) => [one.version, one.url ?? "no server", one.error ? element("span", { class: "bad" }, one.error) : took(one.server_s),
    bytes(one.n_bytes), one.delta_bytes ? bytes(one.delta_bytes) : "–", bytes(one.pulled_bytes), took(one.trainer_s), took(one.pause_s), one.mode]);
  return [element("h2", {}, "Hand-overs"), element("p", { class: "soft" },
    "For each version and server: how long the call took, the bytes, how long the trainer waited before its next step, and how long decoding stood still."),
  element("details", { id: "handovers" }, element("summary", {}, `The newest ${number(list.length)}`), table(["version", "server", { text: "seconds", wrap: true },
    { text: "weights", number: true }, { text: "as delta", number: true }, { text: "pulled", number: true }, { text: "trainer waited", number: true },
    { text: "decoding stood still", number: true }, "mode"], rows))];
}

function showFleet(services, live, fleet) {
  live.textContent = `${fleet.state}${fleet.chain[0] ? `: ${fleet.chain[0]}` : ""}`.slice(0, 140);
  const rows = fleet.services.map((one) => {
    const facts = one.facts || {};
    const engine = facts.internal_state || {};
    const state = one.error ? element("span", { class: "bad" }, one.error) : one.not_ready ? element("span", { class: "warn" }, one.not_ready) : "ready";
    const version = facts.current ?? facts.weight_version ?? facts.version ?? "–";
    return [one.name, state, version, number(engine.running ?? facts.running_episodes), number(engine.queued ?? facts.queued),
      pause(one, facts) ?? facts.phase ?? facts.state ?? "–", memory(one, facts) || "–", one.url];
  });
  const headings = ["service", { text: "state", wrap: true }, "weights", { text: "running", number: true }, { text: "waiting", number: true }, "work", { text: "memory", wrap: true }, "address"];
  const chain = fleet.chain.length ? [element("h2", {}, "Who waits for whom"), ...fleet.chain.map((one) => element("p", {}, `← ${one}`))] : [];
  services.replaceChildren(table(headings, rows), ...chain, ...waits(fleet), ...queue(fleet), ...members(fleet));
}

function ledger(found) {
  const rows = Object.entries(found.dispositions).map(([name, n]) => [name, number(n)]);
  if (rows.length === 0) return [];
  return [element("h2", {}, "Tickets"), table(["disposition", { text: "lines in the ledger", number: true }], rows),
    found.chain ? element("p", { class: "soft" }, "Head of the hash chain: ", element("code", {}, found.chain)) : null].filter(Boolean);
}

function commands(summary) {
  const { path } = summary;
  const lines = [`volley verify ${path}`, `volley replay ${path} --from-step ${Math.max(0, summary.step - 1)}`, `volley eval ${path}`, `volley export ${path} model`];
  return [element("h2", {}, "Commands"), ...lines.map(command)];
}

function settings(found) {
  const rows = Object.entries(found.config).filter(([key]) => !key.startsWith("model.content."))
    .map(([key, value]) => [element("code", {}, key), typeof value === "string" ? value : JSON.stringify(value)]);
  return element("details", { id: "settings" }, element("summary", {}, `Configuration (${rows.length} keys)`),
    table(["key", { text: "value", wrap: true }], rows));
}
