// Line charts of one metric of one or more runs, by uPlot.
import { element, number, visible } from "./page.js";

export const COLORS = ["#2a7f6a", "#c4572b", "#4565b5", "#9a4aa0", "#8a7a1c", "#3a8fb0", "#b03a62", "#5b5f66"];

const STEPS = [1, 2, 5].flatMap((one) => [1, 10, 100, 1e3, 1e4, 1e5].map((scale) => one * scale)).sort((a, b) => a - b);
const AXES = [["step", "step"], ["minutes", "minutes"], ["tokens", "tokens"]];

// What the reader has chosen for all charts: axis, smoothing (weight of the past), logarithmic scale.
export const view = { x: "step", smooth: 0, log: false, ...JSON.parse(localStorage.getItem("charts") || "{}") };

export function controls(changed) {
  const set = (key, value) => { view[key] = value; localStorage.setItem("charts", JSON.stringify(view)); changed(); };
  const select = (key, text, options) => element("label", {}, text, element("select", {
    onchange: (event) => set(key, key === "smooth" ? Number(event.target.value) : event.target.value),
  }, ...options.map(([value, shown]) => element("option", { value, selected: String(view[key]) === String(value) }, shown))));
  const log = element("input", { type: "checkbox", onchange: (event) => set("log", event.target.checked) });
  log.checked = view.log;
  return element("div", { class: "row", role: "group", "aria-label": "Charts" }, select("x", "x axis", AXES),
    select("smooth", "smoothing", [[0, "none"], [0.6, "some"], [0.9, "much"]]), element("label", {}, log, "log scale"));
}

// Return a function from step to the value of the chosen axis, from the curve of a run's steps.
export function axis(curve) {
  const times = curve?.columns.time;
  const known = new Map();
  let tokens = 0;
  (curve?.step ?? []).forEach((step, i) => {
    tokens += (curve.columns.tokens?.[i] ?? 0) * (step - (curve.step[i - 1] ?? step - 1)); // steps may be left out
    known.set(step, view.x === "tokens" ? tokens : times ? (times[i] - times[0]) / 60 : null);
  });
  if (view.x === "step") return (step) => step;
  return (step) => known.get(step) ?? (step === 0 ? 0 : null);
}

// Width of the vertical axis in pixels, in which its longest label is whole.
const width = (_, labels) => Math.max(52, ...(labels ?? []).map((one) => 16 + 7 * one.length));

// Labels with as many digits as their distance needs.
function labels(_, ticks, axisIndex, space, increment) {
  const isWhole = (digits) => Math.abs(Math.round(increment * 10 ** digits) - increment * 10 ** digits) < 1e-6;
  const digits = [0, 1, 2, 3, 4, 5, 6, 7, 8].find(isWhole) ?? 8;
  const text = (one) => (Math.abs(one) >= 1e6 || (one !== 0 && Math.abs(one) < 1e-4) ? one.toExponential(1) : one.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  return ticks.map((one) => (one === null ? "" : view.log && axisIndex ? number(one, 1) : text(one)));
}

// Range of the vertical axis: uPlot's own, except for a curve of zeros, which it would draw at the foot of an axis up to 100.
function range(_, low, high) {
  if (low === null) return [null, null];
  if (view.log && low > 0) return uPlot.rangeLog(low, high, 10, true);
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

// Range of the horizontal axis: around a single value, which uPlot would draw on an axis up to 100.
const xRange = (_, low, high) => (low === null || low < high ? [low, high] : [Math.max(0, low - 1), low + 1]);

function axisColors() {
  const style = getComputedStyle(document.documentElement);
  return { text: style.getPropertyValue("--soft").trim(), line: style.getPropertyValue("--line").trim() };
}

function smoothed(values) {
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = mean === null ? value : view.smooth * mean + (1 - view.smooth) * value;
    return mean;
  });
}

// Add to each curve that is smoothed the one that was measured, thin.
function drawn(series) {
  if (!view.smooth) return series;
  return series.flatMap((one) => (one.dash || one.width === 0 ? [one]
    : [{ ...one, color: `${one.color}55`, width: 1, isRaw: true }, { ...one, values: smoothed(one.values) }]));
}

// Put the series on common values of the axis.
function joined(series) {
  const placed = series.map((one) => one.steps.map(one.at ?? ((step) => step)));
  const places = [...new Set(placed.flat().filter((x) => x !== null))].sort((a, b) => a - b);
  const at = new Map(places.map((x, i) => [x, i]));
  return [places, ...series.map((one, k) => {
    const values = new Array(places.length).fill(null);
    placed[k].forEach((x, i) => { if (x !== null) values[at.get(x)] = view.log && one.values[i] <= 0 ? null : one.values[i] ?? null; });
    return values;
  })];
}

// Only cards that are on the screen, or nearly, are drawn.
const nearby = new IntersectionObserver((entries) => { for (const one of entries) one.target.seen(one.isIntersecting); }, { rootMargin: "300px" });
addEventListener("beforeprint", () => { for (const card of document.querySelectorAll(".card")) card.seen?.(true); });

// series: [{name, color, steps, values, at, dash, width}]; bands: [[upper, lower, color]] by index of series from 1.
export function chart(title, series, { bands = [], height = 170, percent = false } = {}) {
  const box = element("div", {});
  box.style.minHeight = `${height}px`;
  const head = element("span", {});
  const card = element("div", { class: "card", role: "group" }, element("h3", {}, title, head), box);
  const show = (value) => (percent && value !== null ? `${(100 * value).toFixed(1)} %` : number(value));
  let plot = null;
  let shown = [];
  const label = () => {
    const last = series.find((one) => !one.dash && one.values.some((value) => value !== null));
    const value = last ? [...last.values].reverse().find((one) => one !== null && one !== undefined) : null;
    head.textContent = show(value);
    card.setAttribute("aria-label", visible(`${title}, last value ${show(value)}`));
  };
  let isSeen = false;
  let isStale = true;
  let room = 0;
  const draw = () => {
    plot?.destroy();
    plot = null;
    isStale = !isSeen;
    if (isStale || !card.isConnected) return;
    shown = bands.length ? series : drawn(series);
    const { text, line } = axisColors();
    const look = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, font: "11px system-ui" };
    plot = new uPlot({
      width: Math.max(200, room || box.clientWidth), height, legend: { show: false }, cursor: { y: false, sync: { key: "steps" } },
      scales: { x: { time: false, range: xRange }, y: { range, distr: view.log && !percent ? 3 : 1 } },
      axes: [{ ...look, size: 26, ...(view.x === "step" ? { incrs: STEPS } : {}) }, { ...look, size: width, values: percent ? (...given) => given[1].map((one) => (one === null ? "" : `${number(100 * one, 2)} %`)) : labels }],
      bands: bands.map(([upper, lower, fill]) => ({ series: [upper, lower], fill })),
      series: [{}, ...shown.map((one) => ({
        stroke: one.color, width: one.width ?? 1.8, dash: one.dash, spanGaps: true,
        points: { show: one.steps.length < 25 && !one.dash && !one.isRaw, size: 4 },
      }))],
      hooks: { setCursor: [(u) => showValues(u, head, shown, show)] },
    }, joined(shown), box);
  };
  // Take new values; a part of the axis that the reader has chosen by dragging stays.
  card.update = (newer) => {
    series = newer;
    label();
    isStale = !isSeen;
    if (isStale) return;
    const latest = bands.length ? series : drawn(series);
    if (!plot || latest.length !== shown.length) { draw(); return; }
    const [old, now] = [plot.data[0], joined(latest)];
    const isWhole = plot.scales.x.min <= old[0] && plot.scales.x.max >= old[old.length - 1];
    plot.setData(now, isWhole);
    if (!isWhole) plot.redraw();
  };
  card.draw = draw;
  card.seen = (isNear, known = 0) => {
    isSeen = isNear;
    room = known;
    if (isSeen && isStale) card.update(series);
  };
  label();
  nearby.observe(card);
  return card;
}

// Draw the cards on the screen now. All sizes are read before: each one that is read after a change has the page laid out anew.
export function drawVisible(cards) {
  const sized = cards.map((card) => [card, card.getBoundingClientRect().top, card.lastChild.clientWidth]);
  for (const [card, top, width] of sized) if (top < innerHeight) card.seen(true, width);
}

function showValues(u, head, series, show) {
  const i = u.cursor.idx;
  if (i === null || i === undefined) return;
  const parts = series.map((one, k) => [one, u.data[k + 1][i]]).filter(([one, value]) => value !== null && value !== undefined && !one.dash && !one.isRaw);
  if (parts.length === 0) return;
  const text = parts.map(([one, value]) => (parts.length > 1 ? `${one.name} ${show(value)}` : show(value))).join(" · ");
  head.textContent = visible(`${AXES.find(([key]) => key === view.x)[1]} ${number(u.data[0][i])}: ${text}`);
}

export function redraw(root) {
  for (const card of root.querySelectorAll(".card")) card.draw?.();
}
