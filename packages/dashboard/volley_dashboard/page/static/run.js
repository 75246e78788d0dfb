// One run: state, advice, curves, services, ledger, commands.
import { address, command, element, environmentName, fetchJson, number, patch, percent, STATE_COLOURS, table, titled, visible } from "./page.js";
import { axis, chart, COLORS, controls, drawVisible, redraw } from "./charts.js";

const frame = () => new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); });
const FINAL = new Set(["finished", "failed", "stopped", "unreadable", "refused"]);

export async function showRun(main, live, run) {
  const path = `/api/runs/${address(run)}`;
  const [top, below, services] = [element("div", {}), element("div", {}), element("div", { id: "services" })];
  const curves = new Curves(() => draw());
  let found = null;
  let isBehind = false;
  main.replaceChildren(top, curves.root, below);

  // Show the state of the run everywhere.
  function showState(state) {
    found.summary.state = state;
    titled(run, state);
    live.textContent = state;
    live.className = STATE_COLOURS[state] ?? "soft";
    patch(top, ...head(found, run));
    if (FINAL.has(state)) patch(services, element("p", { class: "soft" }, `The run is ${state}: none of its services runs here.`));
  }

  async function draw() {
    const latest = await fetchJson(dataOf(run, curves.wantsAll()));
    if (!main.isConnected) return;
    found = latest;
    showState(found.summary.state);
    if (found.summary.problem) return;
    curves.update(found);
    if (!below.firstChild) await frame(); // the charts first
    patch(below, element("h2", {}, "Services"), services, ...handovers(found.handovers), ...ledger(found), ...commands(found), settings(found));
  }

  await draw();
  if (found === null || found.summary.problem) return null;
  const source = new EventSource(`${path}/events?seen=${encodeURIComponent(found.edition)}`);
  const onRecords = () => {
    isBehind = document.hidden;
    if (!isBehind) draw().catch(() => {});
  };
  const onVisible = () => { if (isBehind) onRecords(); };
  source.addEventListener("records", onRecords);
  document.addEventListener("visibilitychange", onVisible);
  source.addEventListener("fleet", (event) => {
    const fleet = JSON.parse(event.data);
    showState(fleet.state);
    if (!FINAL.has(fleet.state)) showFleet(services, fleet);
  });
  source.onerror = () => { live.textContent = "the dashboard does not answer"; };
  const onTheme = () => redraw(main);
  addEventListener("theme", onTheme);
  addEventListener("resize", onTheme);
  return () => { source.close(); live.className = "soft"; removeEventListener("theme", onTheme); removeEventListener("resize", onTheme); document.removeEventListener("visibilitychange", onVisible); };
}

function head(found, run) {
  const { summary } = found;
  const made = [element("h1", {}, run)];
  if (summary.problem) return [...made, element("p", { class: "bad" }, `This folder is not read: ${summary.problem}`)];
  if (summary.state === "unreadable") {
    made.push(element("p", { class: "bad" }, "run.json cannot be read: it is damaged, or another version of Volley wrote it. Settings, environment and model are unknown."));
  }
  return [...made, ...failure(found), tiles(summary, found), ...advice(found.advice)];
}

function failure({ summary, log }) {
  if (!summary.failed) return [];
  const lines = log ? [element("details", { id: "log" }, element("summary", {}, `End of logs/${log.name}`), element("pre", { class: "scroll", tabindex: "0" }, log.lines.join("\n")))] : [];
  return [element("div", { class: "advice warning", role: "alert" }, element("p", {}, element("b", {}, "The run has failed: "), summary.failed), ...lines)];
}

// Charts of a run. They stay when values arrive, with what the reader has chosen.
class Curves {
  constructor(fetchAll) {
    this.fetchAll = fetchAll;
    this.cards = new Map();
    this.folded = new Map();
    this.found = null;
    this.charts = element("div", {});
    this.root = element("div", {}, controls(() => { for (const card of this.cards.values()) card.update(card.series()); redraw(this.root); }), this.charts);
  }

  update(found) {
    this.found = found.curves;
    const sections = [["Success on held-out tasks", [this.card("success", () => successSeries(this.found))]],
      ...SECTIONS.map(([title, metrics]) => [title, metrics.map(([name, key]) => this.metric("train", key, name))])];
    const wanted = sections.map(([title, cards]) => [title, cards.filter(Boolean)]).filter(([, cards]) => cards.length);
    const shape = wanted.map(([title, cards]) => `${title} ${cards.length}`).join();
    if (shape !== this.shape) {
      this.shape = shape;
      this.charts.replaceChildren(...wanted.flatMap(([title, cards]) => [element("h2", {}, title), element("div", { class: cards.length === 1 ? "cards one" : "cards" }, ...cards)]), ...this.more());
      drawVisible([...this.cards.values()]);
    } else {
      this.more();
    }
  }

  metric(kind, key, name) {
    const values = this.found[kind].columns[key];
    if (!values || values.every((value) => value === null)) return null;
    return this.card(`${kind}/${key}`, () => {
      const curve = this.found[kind];
      return [{ name, steps: curve.step, values: curve.columns[key] ?? [], at: axis(kind === "sft" ? curve : this.found.train), color: COLORS[0] }];
    }, name);
  }

  card(id, series, name) {
    const known = this.cards.get(id);
    if (known) { known.update(series()); return known; }
    const made = id === "success" ? successChart(this.found) : chart(name, series());
    if (!made) return null;
    made.series = series;
    this.cards.set(id, made);
    return made;
  }

  // All other metrics, in parts that open. Their values are fetched when one is open.
  more() {
    for (const [kind, title] of [["train", "All other metrics of steps"], ["eval", "All metrics of evaluations"], ["sft", "Supervised steps"]]) {
      if (this.found[kind].step.length === 0) continue;
      if (!this.folded.has(kind)) {
        this.folded.set(kind, element("details", { ontoggle: () => { if (this.folded.get(kind).open) this.fetchAll(); } },
          element("summary", {}, title), element("div", { class: "cards" })));
      }
      const details = this.folded.get(kind);
      if (details.open) this.fill(kind, details.lastChild);
    }
    return this.folded.size ? [element("h2", {}, "More"), ...this.folded.values()] : [];
  }

  fill(kind, box) {
    const named = new Set(kind === "train" ? ["time", ...SECTIONS.flatMap(([, metrics]) => metrics.map(([, key]) => key))] : ["time"]);
    const keys = Object.keys(this.found[kind].columns).filter((key) => !named.has(key));
    const cards = keys.map((key) => this.metric(kind, key, key)).filter(Boolean);
    if (cards.length !== box.childElementCount) box.replaceChildren(...cards);
  }

  wantsAll() {
    return [...this.folded.values()].some((details) => details.open);
  }
}

function tiles(summary, found) {
  const tile = (name, value) => element("div", { class: "tile" }, element("b", {}, value), element("span", {}, name));
  return element("div", { class: "tiles" }, tile("state", summary.state),
    tile("step", `${number(summary.step)}${summary.max_steps ? ` / ${summary.max_steps}` : ""}`),
    tile("held-out success", percent(summary.success)), tile("reward", number(summary.reward)),
    tile("environment", environmentName(summary.env) || "–"), tile("algorithm", summary.algorithm || "–"), tile("version", found.version ?? "–"));
}

function advice(list) {
  if (list.length === 0) return [];
  return [element("h2", {}, "Health"), ...list.map((one) => element("div", { class: `advice ${one.level}` },
    element("p", {}, element("b", {}, one.level === "warning" ? "Warning: " : "Note: "), one.text), element("p", { class: "soft" }, `What helps: ${one.help}`)))];
}

function successSeries({ success, train }) {
  const at = axis(train);
  const line = (key, extra) => ({ name: key, steps: success.step, values: success.columns[key], at, color: COLORS[0], ...extra });
  const edge = { dash: [2, 3], width: 0.8 };
  return [line("success", {}), line("high", edge), line("low", edge)];
}

function successChart(curves) {
  if (curves.success.step.length === 0) return null;
  return chart("Success, with its 95 % interval", successSeries(curves), { bands: [[2, 3, "rgba(42,127,106,.14)"]], height: 220, percent: true });
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
    tile("tickets issued", state.issued), tile("ended untrained", state.void), tile("quarantined entries", state.dead))];
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
  const rows = (fact(fleet, "mixture") || []).map((one) => [element("span", { title: one.env }, environmentName(one.env)), element("span", { class: one.reason ? "warn" : null }, one.state), percent(one.share),
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
  return [element("h2", {}, "Weight updates"), element("p", { class: "soft" },
    "For each version and server: how long the call took, the bytes, how long the trainer waited before its next step, and how long decoding stood still."),
  element("details", { id: "handovers" }, element("summary", {}, `The newest ${number(list.length)}`), table(["version", "server", { text: "seconds", wrap: true },
    { text: "weights", number: true }, { text: "as delta", number: true }, { text: "pulled", number: true }, { text: "trainer waited", number: true },
    { text: "decoding stood still", number: true }, "mode"], rows))];
}

function showFleet(services, fleet) {
  if (fleet.services.length && fleet.services.every((one) => one.error)) {
    patch(services, element("p", { class: "soft" }, `The run is ${fleet.state}: none of its services answers.`));
    return;
  }
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
  const warnings = fleet.warnings.map((one) => element("p", { class: "warn" }, element("b", {}, "Warning: "), one));
  patch(services, ...warnings, table(headings, rows), ...chain, ...waits(fleet), ...queue(fleet), ...members(fleet));
}

function ledger(found) {
  const rows = Object.entries(found.dispositions).map(([name, n]) => [name, number(n)]);
  if (rows.length === 0 && found.n_steps > 0) return []; // a sample of a long run
  if (rows.length === 0) return [element("h2", {}, "Tickets"), element("p", { class: "soft" }, "No ticket has ended yet.")];
  return [element("h2", {}, "Tickets"), table(["outcome", { text: "lines in the ledger", number: true }], rows),
    found.chain ? element("p", { class: "soft hash" }, "Head of the hash chain: ", element("code", {}, found.chain)) : null].filter(Boolean);
}

function commands(found) {
  return found.commands.length ? [element("h2", {}, "Commands"), ...found.commands.map(command)] : [];
}

function settings(found) {
  const rows = Object.entries(found.config).filter(([key]) => !key.startsWith("model.content."))
    .map(([key, value]) => [element("code", {}, key), typeof value === "string" ? value : JSON.stringify(value)]);
  return element("details", { id: "settings" }, element("summary", {}, `Configuration (${rows.length} keys)`),
    table(["key", { text: "value", wrap: true }], rows));
}
