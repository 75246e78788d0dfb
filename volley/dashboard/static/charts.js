// Line charts of one metric of one or more runs, by uPlot.
import { element, number } from "./page.js";

export const COLORS = ["#2a7f6a", "#c4572b", "#4565b5", "#9a4aa0", "#8a7a1c", "#3a8fb0", "#b03a62", "#5b5f66"];

const STEPS = [1, 2, 5].flatMap((one) => [1, 10, 100, 1e3, 1e4, 1e5].map((scale) => one * scale)).sort((a, b) => a - b);

// Width of the vertical axis in pixels, in which its longest label is whole.
const width = (_, labels) => Math.max(52, ...(labels ?? []).map((one) => 16 + 7 * one.length));

// Range of the vertical axis: uPlot's own, except for a curve of zeros, which it would draw at the foot of an axis up to 100.
function range(_, low, high) {
  if (low === null) return [null, null];
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

function axisColors() {
  const style = getComputedStyle(document.documentElement);
  return { text: style.getPropertyValue("--soft").trim(), line: style.getPropertyValue("--line").trim() };
}

// Put the series of several runs on common steps.
function joined(series) {
  const steps = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, i) => [step, i]));
  return [steps, ...series.map((one) => {
    const values = new Array(steps.length).fill(null);
    one.steps.forEach((step, i) => { values[at.get(step)] = one.values[i] ?? null; });
    return values;
  })];
}

// series: [{name, color, steps, values, dash, width}]; bands: [[upper, lower, color]] by index of series from 1.
export function chart(title, series, { bands = [], height = 170, percent = false } = {}) {
  const last = series.find((one) => !one.dash && one.values.some((value) => value !== null));
  const value = last ? [...last.values].reverse().find((one) => one !== null && one !== undefined) : null;
  const shown = percent && value !== null ? `${(100 * value).toFixed(1)} %` : number(value);
  const box = element("div", {});
  const label = `${title}, last value ${shown}`;
  const card = element("div", { class: "card", role: "group", "aria-label": label },
    element("h3", {}, title, element("span", {}, shown)), box);
  let plot = null;
  const draw = () => {
    if (!card.isConnected) return;
    plot?.destroy();
    const { text, line } = axisColors();
    const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line }, font: "11px system-ui" };
    plot = new uPlot({
      width: Math.max(200, box.clientWidth), height, legend: { show: false }, cursor: { y: false, sync: { key: "steps" } },
      scales: { x: { time: false }, y: { range } },
      axes: [{ ...axis, size: 26, incrs: STEPS }, { ...axis, size: width, values: (_, ticks) => ticks.map((one) => number(one, 2)) }],
      bands: bands.map(([upper, lower, fill]) => ({ series: [upper, lower], fill })),
      series: [{}, ...series.map((one) => ({
        stroke: one.color, width: one.width ?? 1.8, dash: one.dash, spanGaps: true,
        points: { show: one.steps.length < 25 && !one.dash, size: 4 },
      }))],
      hooks: { setCursor: [(u) => showValues(u, card, series, percent)] },
    }, joined(series), box);
  };
  card.draw = draw;
  requestAnimationFrame(draw);
  return card;
}

function showValues(u, card, series, percent) {
  const i = u.cursor.idx;
  const head = card.querySelector("h3 span");
  if (i === null || i === undefined) return;
  const parts = series.map((one, k) => [one, u.data[k + 1][i]]).filter(([one, value]) => value !== null && !one.dash);
  if (parts.length === 0) return;
  const text = parts.map(([one, value]) => (percent ? `${(100 * value).toFixed(1)} %` : number(value))).join(" · ");
  head.textContent = `step ${u.data[0][i]}: ${text}`;
}

export function redraw(root) {
  for (const card of root.querySelectorAll(".card")) card.draw?.();
}
