// The page follows its form: every change asks for a new plan, and the address says the same.

import { fill, packed, queryOf, unpacked } from "./address.js";
import { ask, Failed, Replaced } from "./ask.js";
import { onMove, redraw, show } from "./room.js";

const form = document.getElementById("planner");
const view = document.getElementById("view");
const answer = document.getElementById("answer");
const offline = document.getElementById("offline");
const announce = document.getElementById("announce");
const config = document.getElementById("config");
const gpus = document.getElementById("gpus");
const defaults = JSON.parse(form.dataset.defaults);
const AFTER_TYPING_MS = 250;

let pinned = new URLSearchParams(location.search).get("a");
let pinnedConfig = "";
let waiting = 0;

const source = () => form.elements.namedItem("source").value;
const query = () => queryOf(form, defaults, pinned);
const heldConfig = () => (source() === "config" ? config.value.trim() : "");

/** What every question about this page says. */
function asked() {
  return {
    query: query(),
    config: heldConfig() || null,
    a_config: pinnedConfig || null,
    width: Math.round(Math.min(Math.max(view.querySelector("#picture .picture")?.clientWidth || answer.clientWidth - 46, 240), 1600)),
  };
}

/** Plan what the form says, show it, and let the address say it. */
async function replan({ push = false } = {}) {
  clearTimeout(waiting);
  await remember(push);
  answer.setAttribute("aria-busy", "true");
  try {
    replace(await ask("view", "/view", asked()));
    offline.hidden = true;
  } catch (error) {
    if (error instanceof Replaced) return;
    if (!(error instanceof Failed)) throw error;
    offline.textContent = `${error.message} What is shown is the last plan.`;
    offline.hidden = false;
    answer.removeAttribute("aria-busy");
    return;
  }
  answer.removeAttribute("aria-busy");
  shown();
}

/** Put the parts that came into their places; focus, open folds and what is still true stay. */
function replace(parts) {
  const came = new DOMParser().parseFromString(parts, "text/html");
  const same = came.getElementById("verdict").dataset.query === document.getElementById("verdict").dataset.query;
  const suggestions = document.getElementById("suggestions");
  const focused = nameOf(document.activeElement);
  const folds = [...answer.querySelectorAll("#details details")].map((fold) => fold.open);
  for (const id of ["view", "details"]) document.getElementById(id).replaceChildren(...came.getElementById(id).childNodes);
  if (same) document.getElementById("suggestions")?.replaceChildren(...(suggestions?.childNodes ?? []));
  else document.getElementById("log-answer").replaceChildren();
  const now = answer.querySelectorAll("#details details");
  if (now.length === folds.length) now.forEach((fold, index) => (fold.open = folds[index]));
  if (focused !== null) answer.querySelector(focused)?.focus({ preventScroll: true });
}

/** Return a selector of a control in a part that may be replaced, by which it is found again. */
function nameOf(control) {
  if (control === null || !control.closest("#view, #details")) return null;
  if (control.id) return `#${CSS.escape(control.id)}`;
  const [name, value] = ["query", "copy"].map((key) => [key, control.dataset[key]]).find(([, found]) => found) ?? [];
  return value ? `[data-${name}="${CSS.escape(value)}"]` : null;
}

/** After a new plan is on the page: say it, mark the fields it complains of, look for what would fit. */
function shown() {
  const verdict = document.getElementById("verdict");
  document.title = verdict.dataset.title;
  announce.textContent = verdict.dataset.says;
  const pocket = document.getElementById("pocket");
  pocket.textContent = document.getElementById("headline").textContent;
  pocket.className = `pocket scripted ${verdict.dataset.kind}`;
  mark(verdict);
  document.getElementById("pin").disabled = verdict.dataset.request === undefined;
  document.getElementById("log").hidden = verdict.dataset.request === undefined;
  const request = verdict.dataset.request ? JSON.parse(verdict.dataset.request) : null;
  const points = verdict.dataset.growth ? JSON.parse(verdict.dataset.growth) : null;
  document.getElementById("growth-words").textContent = verdict.dataset.growthWords ?? "";
  const room = show(request, points);
  const suggested = document.querySelector("#suggestions [data-looking]") ? suggest() : null;
  return Promise.all([room, suggested]);
}

async function suggest() {
  const place = document.getElementById("suggestions");
  try {
    place.innerHTML = await ask("suggestions", "/view/suggestions", asked());
  } catch (error) {
    if (error instanceof Failed) place.textContent = error.message;
    else if (!(error instanceof Replaced)) throw error;
  }
}

/** Put every sentence at the field it concerns. */
function mark(verdict) {
  for (const place of form.querySelectorAll("[data-error-of]")) {
    place.textContent = "";
    place.hidden = true;
    document.getElementById(place.dataset.errorOf)?.removeAttribute("aria-invalid");
  }
  for (const problem of verdict.querySelectorAll("[data-fields]")) {
    for (const name of problem.dataset.fields.split(" ").filter(Boolean)) {
      const place = document.getElementById(`${name}-error`);
      if (place === null) continue;
      place.textContent = `${place.textContent} ${problem.querySelector("span").textContent}`.trim();
      place.hidden = false;
      const control = document.getElementById(name);
      control?.setAttribute("aria-invalid", "true");
      control?.closest("details")?.setAttribute("open", "");
    }
  }
}

async function remember(push) {
  const fragment = await packed({ config: heldConfig(), "a-config": pinnedConfig });
  const said = query();
  const address = `${location.pathname}${said ? `?${said}` : ""}${fragment}`;
  if (address === location.pathname + location.search + location.hash) return;
  if (push) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
}

/** Take the form to a query, as if it was typed, and plan it. */
async function go(said) {
  fill(form, defaults, said);
  countGpus();
  await replan({ push: true });
}

function countGpus() {
  gpus.value = String((Number(form.elements.tp.value) || 1) * (Number(form.elements.pp.value) || 1));
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  replan({ push: true });
});

form.addEventListener("input", (event) => {
  if (event.target === gpus) {
    const each = Math.max(1, Math.floor((Number(gpus.value) || 1) / (Number(form.elements.pp.value) || 1)));
    form.elements.tp.value = String(each);
    if (form.elements.ep.value !== "1") form.elements.ep.value = String(each);
  } else if (event.target.name === "tp" || event.target.name === "pp") {
    countGpus();
  }
  clearTimeout(waiting);
  waiting = setTimeout(replan, event.target.type === "text" || event.target.type === "number" || event.target === config ? AFTER_TYPING_MS : 0);
});

gpus.addEventListener("change", countGpus); // what does not divide into the stages is not planned, and not shown

document.getElementById("config-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (file) config.value = await file.text();
  event.target.value = "";
  replan({ push: true });
});

answer.addEventListener("submit", (event) => {
  const button = event.target.querySelector("button[data-query]");
  if (button === null) return;
  event.preventDefault();
  answer.focus({ preventScroll: true });
  go(button.dataset.query);
});

answer.addEventListener("click", async (event) => {
  const button = event.target.closest("button, a");
  if (button?.dataset.copy) await copy(button, document.getElementById(button.dataset.copy).textContent);
  else if (button?.id === "save-json") await save("plan", "/api/plan", planRequest(), "plan.json", "application/json");
  else if (button?.id === "save-html" && heldConfig()) {
    event.preventDefault();
    await save("report", "/api/report", planRequest(), "report.html", "text/html");
  } else if (button?.id === "unpin") {
    [pinned, pinnedConfig] = [null, ""];
    await replan({ push: true });
  } else if (button?.id === "swap") {
    const back = pinned;
    if (new URLSearchParams(back).get("source") === "config") config.value = pinnedConfig;
    await go(back);
  }
});

function planRequest() {
  return { ...JSON.parse(document.getElementById("verdict").dataset.request), suggestions: true };
}

async function save(kind, path, body, name, type) {
  try {
    const text = await ask(kind, path, body);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  } catch (error) {
    if (!(error instanceof Failed)) throw error;
    offline.textContent = error.message;
    offline.hidden = false;
  }
}

async function copy(button, text) {
  button.dataset.label ??= button.textContent;
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    said = "Cannot copy";
  }
  button.textContent = announce.textContent = said;
  setTimeout(() => (button.textContent = button.dataset.label), 1500);
}

document.getElementById("pin").addEventListener("click", async () => {
  const said = new URLSearchParams(query());
  said.delete("a");
  [pinned, pinnedConfig] = [said.toString(), heldConfig()];
  await replan({ push: true });
  document.getElementById("compared")?.scrollIntoView({ block: "nearest" });
});

document.getElementById("share").addEventListener("click", async (event) => {
  await remember(false);
  await copy(event.target, location.href);
});

const theme = document.getElementById("theme");
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : systemDark.matches);

theme.addEventListener("click", () => {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("tonnage-theme", next);
  } catch {
    // Storage is switched off: it holds until the page is left.
  }
  recolour();
});
systemDark.addEventListener("change", recolour);

function recolour() {
  theme.setAttribute("aria-pressed", String(isDark()));
  redraw();
}

const logText = document.getElementById("log-text");
const logAnswer = document.getElementById("log-answer");

document.getElementById("log-read").addEventListener("click", readLog);
document.getElementById("log-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (file) logText.value = await file.text();
  event.target.value = "";
  await readLog();
});

async function readLog() {
  try {
    logAnswer.innerHTML = await ask("log", "/view/log", { ...asked(), log: logText.value });
  } catch (error) {
    if (!(error instanceof Failed)) throw error;
    logAnswer.textContent = error.message;
  }
}

onMove(({ context, concurrency }) => {
  form.elements.context.value = String(context);
  form.elements.concurrency.value = String(concurrency);
  replan({ push: true });
});

window.addEventListener("popstate", restore);
window.addEventListener("online", () => replan());

/** Take the form to what the address says, and plan it. */
async function restore() {
  pinned = new URLSearchParams(location.search).get("a");
  fill(form, defaults, location.search);
  await begin();
}

/** Plan what the form says, once it has the configs of the address. */
async function begin() {
  countGpus();
  try {
    const configs = await unpacked(location.hash);
    config.value = configs.config ?? "";
    pinnedConfig = configs["a-config"] ?? "";
  } catch {
    offline.textContent = "The config in the address cannot be read.";
    offline.hidden = false;
  }
  await replan();
}

/** The width the picture is drawn for follows the window. */
let width = 0;
new ResizeObserver(([entry]) => {
  const now = Math.round(entry.contentRect.width);
  if (width && Math.abs(now - width) > 24) {
    clearTimeout(waiting);
    waiting = setTimeout(replan, AFTER_TYPING_MS);
  }
  width = now;
}).observe(answer);

theme.setAttribute("aria-pressed", String(isDark()));
if (document.getElementById("verdict").dataset.malformed === undefined) begin(); // the form came filled, and may have been changed since
else shown();
