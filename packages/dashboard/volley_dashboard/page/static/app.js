// Router of the dashboard: the part of the address after # names the page.
import { element, Problem, titled } from "./page.js";

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const live = document.getElementById("live");
let stop = () => {};

const pages = [
  [/^\/?$/, async (view) => (await import("./runs.js")).showRuns(view)],
  [/^\/run\/([^/?]+)$/, async (view, run) => (await import("./run.js")).showRun(view, live, run)],
  [/^\/run\/([^/?]+)\/episodes$/, async (view, run, query) => (await import("./episodes.js")).showEpisodes(view, run, query)],
  [/^\/ticket\/(\d+)$/, (view, ticket) => { location.replace(`#/run/${lastRun()}/ticket/${ticket}`); }],
  [/^\/run\/([^/?]+)\/ticket\/([^?]+)$/, async (view, run, ticket, query) => (await import("./ticket.js")).showTicket(view, run, ticket, query)],
];

async function route() {
  stop();
  stop = () => {};
  live.textContent = "";
  titled();
  const [path, search] = (location.hash.slice(1) || "/").split("?");
  const query = new URLSearchParams(search || "");
  showLinks(path);
  for (const [pattern, show] of pages) {
    const found = path.match(pattern);
    if (!found) continue;
    // Each page has a place of its own: one that is left before its data arrive draws nothing over the next.
    const view = element("div", { tabindex: "-1" }, element("p", { class: "soft" }, "Loading…"));
    main.replaceChildren(view);
    try {
      const leave = (await show(view, ...found.slice(1).map(decodeURIComponent), query)) || (() => {});
      if (!view.isConnected) return leave();
      stop = leave;
    } catch (error) {
      if (!view.isConnected) return;
      showProblem(error);
    }
    view.focus({ preventScroll: true });
    return;
  }
  showProblem(new Problem("there is no such page"));
}

// The run that was looked at before, for an address that names none.
function lastRun() {
  return sessionStorage.getItem("run") ?? "";
}

function showLinks(path) {
  const run = path.match(/^\/run\/([^/?]+)/);
  if (run) sessionStorage.setItem("run", run[1]);
  const links = [["#/", "Runs"]];
  if (run) links.push([`#/run/${run[1]}`, decodeURIComponent(run[1])], [`#/run/${run[1]}/episodes`, "Episodes"]);
  nav.replaceChildren(...links.map(([href, text]) => {
    const link = element("a", { href }, text);
    if (href.slice(1) === path) link.setAttribute("aria-current", "page");
    return link;
  }));
}

function showProblem(error) {
  const hint = error.status === 401
    ? "Open the link that `volley dashboard` or `volley train` printed. It works once; start `volley dashboard` for a new one."
    : error.hint || "";
  main.replaceChildren(element("h1", {}, error.status === 401 ? "Sign-in link expired" : "This cannot be shown"),
    element("p", {}, error.message), element("p", { class: "soft" }, hint));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("theme"));
}

document.getElementById("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", theme);
  setTheme(theme);
});
setTheme(localStorage.getItem("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part after # names a page
  main.focus();
});
addEventListener("hashchange", route);
route();
