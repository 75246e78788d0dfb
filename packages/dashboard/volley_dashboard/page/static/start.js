// The curves of a run's page, and the request for them. This script stands in the page itself, so that the request goes out
// before other files have arrived; its names are global.
const SECTIONS = [
  ["Learning", [["Reward", "reward_mean"], ["Success in training", "success"], ["Loss", "loss"], ["Gradient norm", "grad_norm"],
    ["Entropy", "entropy"], ["KL to the reference", "kl"]]],
  ["Off-policy", [["Staleness, mean", "staleness_mean"], ["Clipped tokens", "clip_fraction"], ["Effective share of tokens", "effective_share"],
    ["Rejected tokens", "rejected_fraction"], ["Log-prob mismatch, nats", "logprob_abs_diff_current"],
    ["Zero-advantage groups", "zero_variance_groups"]]],
  ["Speed", [["Tokens/s", "tokens_per_sec"], ["Step time, s", "step_s"], ["Wait for groups, s", "wait_s"],
    ["Packing efficiency", "packing_efficiency"], ["Tokens a step", "tokens"], ["Truncated episodes", "truncation_rate"]]],
];

// Address of a run's data; with `all`, of all curves and not only those that are drawn at first.
function dataOf(run, all = false) {
  const shown = ["time", ...SECTIONS.flatMap(([, metrics]) => metrics.map(([, key]) => key))].join();
  return `/api/runs/${encodeURIComponent(run)}${all ? "" : `?columns=${shown}`}`;
}

const openedRun = location.hash.match(/^#\/run\/([\w.-]+)$/);
let early = openedRun && { path: dataOf(openedRun[1]), answer: fetch(dataOf(openedRun[1])) };
early?.answer.catch(() => {}); // who takes it is told

// Return the answer that is on its way, once, if it is the one to this path.
function takeEarly(path) {
  const answer = early?.path === path ? early.answer : null;
  early = null;
  return answer;
}
