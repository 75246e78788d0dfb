// Trajectory viewer: episodes side by side, token by token.
// A reference is VERSION.TICKET.SAMPLE; several, separated by commas, are shown beside each other.
import { address, command, element, environmentName, fetchJson, number, Problem, table, titled, visible } from "./page.js";

const PART = 1500; // tokens drawn at once, when they come into view
// Flag as in shared.run.token_values, name, level of colour; the last that applies is drawn.
const MARKS = [[0, "unchanged", 0], [2, "truncated", 1], [1, "clipped", -0.4], [4, "rejected", -1]];
const COLOURS = [["logprob", "behaviour log-probability"], ["probability", "behaviour probability"], ["ratio", "ratio trainer / behaviour"],
  ["advantage", "advantage"], ["marks", "clip and importance masks"], ["weight", "importance weight"], ["staleness", "weight version"], ["teacher", "teacher − behaviour"], ["mask", "in the loss"], ["none", "nothing"]];

// VERSION.TICKET.SAMPLE, VERSION.TICKET, or TICKET alone, which is that of the newest step.
function parsed(reference) {
  const parts = reference.split(".");
  const [version, ticket, sample] = parts.length === 1 ? ["", ...parts] : parts;
  if (!/^\d+$/.test(ticket)) throw new Problem(`${reference} names no ticket`, 0, "Write /ticket/17, or choose one in the list of episodes.");
  return { version, ticket, sample: Number(sample ?? 0) };
}

export async function showTicket(main, run, references, query) {
  const wanted = references.split(",").map(parsed);
  const groups = new Map();
  for (const { version, ticket } of wanted) {
    const key = `${version}.${ticket}`;
    if (!groups.has(key)) groups.set(key, await fetchJson(`/api/runs/${address(run)}/tickets/${address(ticket)}?version=${encodeURIComponent(version)}`));
  }
  const shown = wanted.map((one) => {
    const group = groups.get(`${one.version}.${one.ticket}`);
    return { group, episode: group.trajectories.find((each) => each.sample === one.sample) ?? group.trajectories[0] };
  });
  const first = shown[0].group;
  const detail = element("aside", { id: "detail", class: "card", "aria-live": "polite" }, element("p", { class: "soft" }, "Choose a token. ← and → go to its neighbours, ↑ and ↓ from turn to turn."));
  const state = { colour: query.get("colour") || "logprob", chosen: null };
  const columns = element("div", { class: "columns", tabindex: "0", role: "group", "aria-label": "Episodes, token by token" });
  const picker = element("select", { "aria-label": "Colour of tokens", onchange: (event) => { state.colour = event.target.value; draw(); } },
    ...COLOURS.filter(([key]) => available(key, shown)).map(([key, text]) => element("option", { value: key, selected: key === state.colour }, text)));

  const legend = element("span", { class: "legend" });
  function draw() {
    legend.replaceChildren(...scale(state.colour));
    columns.replaceChildren(...shown.map(({ group, episode }, i) => episodeView(group, episode, state, detail, shown, i)), detail);
  }
  draw();
  titled(run, `ticket ${first.ticket}`);
  main.replaceChildren(neighbours(run, first), element("h1", {}, shown.length > 1 ? `${shown.length} episodes side by side` : `Ticket ${first.ticket}, sample ${shown[0].episode.sample}`),
    element("div", { class: "row" }, element("label", {}, "colour by", picker), legend),
    siblings(run, first, wanted), columns, ...links(run, first));
  main.onkeydown = (event) => move(event, columns);
  return () => { main.onkeydown = null; };
}

function neighbours(run, { neighbours: found }) {
  const link = (reference, text) => (reference ? element("a", { href: `#/run/${address(run)}/ticket/${address(reference)}` }, text) : element("span", { class: "soft" }, text));
  return element("nav", { class: "row", "aria-label": "Tickets" }, link(found.previous, "← previous ticket"), link(found.next, "next ticket →"),
    element("a", { href: `#/run/${address(run)}/episodes` }, "all episodes"));
}

function available(key, shown) {
  const sequences = shown.flatMap(({ episode }) => episode.sequences);
  if (key === "teacher") return sequences.some((one) => one.teacher);
  if (["ratio", "advantage", "marks", "weight"].includes(key)) return sequences.some((one) => one[key]);
  return true;
}

function scale(colour) {
  const levels = colour === "marks" ? MARKS.map(([, text, at]) => [text, at]) : [["low", -1], ["middle", 0], ["high", 1]];
  return levels.map(([text, at]) => {
    const mark = element("i");
    mark.style.background = tint(at);
    return element("span", {}, mark, text);
  });
}

function siblings(run, group, wanted) {
  const rows = group.trajectories.map((one) => {
    const reference = `${group.version}.${group.ticket}.${one.sample}`;
    const isShown = wanted.some((each) => each.sample === one.sample && each.ticket === String(group.ticket));
    const all = [...new Set([...wanted.map((each) => `${each.version}.${each.ticket}.${each.sample}`), reference])].join(",");
    return [element("a", { href: `#/run/${address(run)}/ticket/${address(reference)}`, "aria-current": isShown ? "true" : null }, `${isShown ? "▸ " : ""}${one.sample}`),
      number(one.reward), Object.entries(one.components).map(([key, value]) => `${key} ${number(value)}`).join(", ") || "–",
      one.success ? "yes" : "no", one.end ?? one.status, number(one.sequences.reduce((sum, each) => sum + each.mask.reduce((a, b) => a + b, 0), 0)),
      Object.entries(one.timings).map(([key, value]) => `${key.replace(/_s$/, "")} ${value.toFixed(2)} s`).join(", ") || "–",
      Object.entries(one.failures).map(([key, value]) => `${key} ${value}`).join(", ") || "–",
      element("a", { href: `#/run/${address(run)}/ticket/${address(all)}` }, "beside")];
  });
  const headings = ["sample", { text: "reward", number: true }, { text: "components", wrap: true }, "success", "end", { text: "sampled", number: true }, { text: "time", wrap: true }, "failed attempts", "compare"];
  return element("details", { open: true }, element("summary", {}, `Group of ticket ${group.ticket}: ${environmentName(group.env)}, ${group.task}, trained in step ${group.step}`), table(headings, rows));
}

function episodeView(group, episode, state, detail, shown, column) {
  const title = `step ${group.step}, ticket ${group.ticket}, sample ${episode.sample}: reward ${number(episode.reward)}`;
  const parts = episode.sequences.map((sequence, i) => {
    const name = i === 0 ? "" : sequence.parent < 0 ? `Sequence ${i}: begins by itself` : `Sequence ${i}: branches from ${sequence.parent} after ${sequence.shared} tokens`;
    return element("div", {}, name ? element("h3", {}, name) : null, ...sequenceView(group, sequence, state, detail, differs(shown, column, i)));
  });
  const ends = episode.sequences.at(-1).turns.at(-1)?.[2] === "assistant";
  return element("section", { "aria-label": title }, element("h2", {}, title),
    episode.teacher_lacks.length ? element("p", { class: "soft" }, `No teacher: it lacked ${episode.teacher_lacks.join(", ")}.`) : null, ...parts,
    ends ? element("p", { class: "soft" }, "Archives hold what the model read and wrote: not the environment's reply to the last answer.") : null);
}

// Position from which the same sequence of the first shown episode has other tokens.
function differs(shown, column, i) {
  if (column === 0) return null;
  const [mine, other] = [shown[column].episode.sequences[i], shown[0].episode.sequences[i]];
  if (!mine || !other) return null;
  let at = 0;
  while (at < mine.ids.length && mine.ids[at] === other.ids[at]) at += 1;
  return at;
}

function sequenceView(group, sequence, state, detail, differsAt) {
  const start = sequence.shared;
  let turns = sequence.turns.filter(([, end]) => end > start);
  if (turns.length === 0) turns = [[start, sequence.ids.length, "tokens", 0]];
  const made = [];
  let at = start;
  if (sequence.teacher_prompt) {
    const { text, version } = sequence.teacher_prompt;
    made.push(element("details", {}, element("summary", {}, `The teacher's prompt${version ? `, weights ${version}` : ""}`), element("pre", {}, text)));
  }
  const add = (from, to, role, reward) => {
    const note = `${role}${reward ? `, reward ${number(reward)}` : ""}`;
    const facts = `${to - from} tokens${versionsIn(sequence, from, to)}`;
    made.push(element("div", { class: `turn ${role === "assistant" ? "assistant" : ""}` }, element("div", { class: "label" }, element("span", {}, note), element("span", {}, facts)), tokens(sequence, from, to, state, detail, group, differsAt)));
  };
  for (const [from, to, role, reward] of turns) {
    if (from > at) add(at, from, "template", 0);
    add(Math.max(from, at), to, role, reward);
    at = Math.max(at, to);
  }
  if (at < sequence.ids.length) add(at, sequence.ids.length, "template", 0);
  return made;
}

function versionsIn(sequence, from, to) {
  const spans = sequence.versions.filter(([, start, end]) => start < to && end > from);
  const names = spans.map(([name, , , server]) => (server ? `${name} on ${server}` : name));
  return names.length ? `, weights ${[...new Set(names)].join(", ")}` : "";
}

function tokens(sequence, from, to, state, detail, group, differsAt) {
  const box = element("div", { class: "tokens" });
  for (let start = from; start < to; start += PART) {
    const part = element("div", { class: "part" });
    const end = Math.min(start + PART, to);
    const fill = () => part.replaceChildren(...range(start, end).map((i) => token(sequence, i, state, detail, group, differsAt)));
    if (to - from <= PART) fill();
    else {
      part.style.minHeight = `${Math.ceil((end - start) / 14) * 1.4}rem`;
      new IntersectionObserver((entries, observer) => {
        if (entries.some((one) => one.isIntersecting)) { fill(); part.style.minHeight = ""; observer.disconnect(); }
      }, { rootMargin: "600px" }).observe(part);
    }
    box.append(part);
  }
  return box;
}

const range = (from, to) => Array.from({ length: to - from }, (_, i) => from + i);

function token(sequence, i, state, detail, group, differsAt) {
  const text = visible(sequence.texts[i]);
  const made = element("span", { "data-i": i }, text === "" ? "·" : text);
  if (text === "") made.classList.add("sign");
  const level = shade(sequence, i, state.colour, group);
  if (level !== null) {
    made.style.background = tint(level);
    made.classList.add("sampled");
  }
  if (i === differsAt) made.append(element("b", { class: "warn", title: "from here on the tokens differ" }, "≠"));
  made.onclick = () => choose(made, sequence, i, detail, group);
  made.choose = made.onclick;
  return made;
}

function versionAt(sequence, i) {
  return sequence.versions.find(([, start, end]) => start <= i && i < end)?.[0] ?? null;
}

const stepOf = (version) => Number(version.split("-s")[1]);

// Level between -1 and 1 of a sampled token; null for no colour.
function shade(sequence, i, colour, group) {
  if (!sequence.mask[i] || colour === "none") return null;
  const logprob = sequence.logprobs[i];
  if (colour === "mask") return 0.4;
  if (colour === "probability") return 2 * Math.exp(logprob) - 1;
  if (colour === "teacher") return clamp(sequence.teacher[i] - logprob);
  if (colour === "staleness") return clamp(1 - (group.step - 1 - stepOf(versionAt(sequence, i))) / 2);
  if (colour === "ratio") return clamp(4 * (sequence.ratio[i] - 1));
  if (colour === "advantage") return clamp(sequence.advantage[i] / 2);
  if (colour === "weight") return clamp(2 * (sequence.weight[i] - 1));
  if (colour === "marks") return MARKS.findLast(([flag]) => flag === 0 || sequence.marks[i] & flag)[2];
  return clamp(1 + logprob / 2.5);
}

const clamp = (value) => Math.max(-1, Math.min(1, value));

function tint(level) {
  return level < 0 ? `hsl(12 85% ${Math.round(88 + 20 * level)}%)` : `hsl(150 45% ${Math.round(92 - 22 * level)}%)`;
}

function choose(span, sequence, i, detail, group) {
  document.querySelector(".tokens .chosen")?.classList.remove("chosen");
  span.classList.add("chosen");
  span.scrollIntoView({ block: "nearest" });
  const version = versionAt(sequence, i);
  const facts = [["token", JSON.stringify(sequence.texts[i])], ["id", sequence.ids[i]], ["position", i], ["in the loss", sequence.mask[i] ? "yes" : "no"]];
  if (sequence.mask[i]) {
    facts.push(["log p (behaviour)", number(sequence.logprobs[i], 4)], ["p", number(Math.exp(sequence.logprobs[i]), 4)], ["weights", version], ["staleness", group.step - 1 - stepOf(version)]);
    if (sequence.teacher) facts.push(["log p (teacher)", number(sequence.teacher[i], 4)]);
    if (sequence.trainer) facts.push(["log p (trainer)", number(sequence.trainer[i], 4)]);
    if (sequence.ratio) facts.push(["ratio", number(sequence.ratio[i], 4)]);
    if (sequence.advantage) facts.push(["advantage", number(sequence.advantage[i], 4)]);
    if (sequence.weight) facts.push(["importance weight", number(sequence.weight[i], 4)]);
    if (sequence.marks) facts.push(["masks", MARKS.filter(([flag]) => sequence.marks[i] & flag).map(([, text]) => text).join(", ") || "none"]);
    if (sequence.clipped) facts.push(["clipped", sequence.clipped[i] ? "yes" : "no"]);
  }
  detail.replaceChildren(element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))])));
}

function move(event, columns) {
  const chosen = columns.querySelector(".chosen");
  const all = [...columns.querySelectorAll(".tokens span[data-i]")];
  if (all.length === 0 || !["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(event.key)) return;
  if (["INPUT", "SELECT"].includes(event.target.tagName)) return;
  event.preventDefault();
  const at = chosen ? all.indexOf(chosen) : -1;
  let to = at + (event.key === "ArrowLeft" ? -1 : 1);
  if (event.key === "ArrowUp" || event.key === "ArrowDown") {
    const turn = chosen?.closest(".turn");
    const turns = [...columns.querySelectorAll(".turn")];
    const next = turns[turns.indexOf(turn) + (event.key === "ArrowUp" ? -1 : 1)];
    to = next ? all.indexOf(next.querySelector("span[data-i]")) : at;
  }
  all[Math.max(0, Math.min(all.length - 1, to))]?.choose();
}

// A value of a ledger's line: a list of versions without brackets, nothing as a dash.
function plain(value) {
  if (value === null) return "–";
  return Array.isArray(value) && value.every((one) => typeof one === "string") ? value.join(", ") : typeof value === "string" ? value : JSON.stringify(value);
}

function links(run, group) {
  const lines = group.ledger.map((line) => table(["key", { text: "value", wrap: true }],
    Object.entries(line).map(([key, value]) => [key, plain(value)]), "Line of the ledger"));
  const none = element("p", { class: "soft" }, "The ledger has no line of this ticket yet: the trainer writes it when its step is durable.");
  return [element("h2", {}, "Ledger"), ...(lines.length ? lines : [none]),
    element("h2", {}, "Repeat"), ...group.commands.map(command)];
}
