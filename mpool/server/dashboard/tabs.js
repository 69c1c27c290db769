// The tabs of the page. The address remembers the tab: /#/models. The slash keeps the browser from scrolling to an
// element of this name.
import { byId } from "./dom.js";

const TABS = ["overview", "models", "requests", "playground"];
const listeners = [];
export const named = () => location.hash.replace(/^#\/?/, "");

export let tab = "overview";
// Call a function with the name of every tab that is opened.
export const onTab = (listener) => listeners.push(listener);

export function open(name, focus = false) {
  tab = TABS.includes(name) ? name : "overview";
  for (const one of TABS) {
    const chosen = one === tab, control = byId(`tab-${one}`);
    control.setAttribute("aria-selected", String(chosen));
    control.tabIndex = chosen ? 0 : -1;
    byId(one).hidden = !chosen;
    if (chosen && focus) control.focus();
  }
  if (named() !== tab) history.replaceState(null, "", `#/${tab}`);
  for (const listener of listeners) listener(tab);
}

for (const [at, name] of TABS.entries()) {
  byId(`tab-${name}`).addEventListener("click", () => open(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = event.key === "Home" ? 0 : event.key === "End" ? TABS.length - 1
      : step && (at + step + TABS.length) % TABS.length;
    if (next === undefined) return;
    event.preventDefault();
    open(TABS[next], true);
  });
}
addEventListener("hashchange", () => open(named()));

// ---- width ----------------------------------------------------------------------------------------------------------

// Below these widths, the rows of the tables of a tab are cards: the tables have different numbers of columns.
for (const [name, width] of [["requests", "72rem"], ["models", "48rem"]]) {
  const narrow = matchMedia(`(max-width: ${width})`);
  const apply = () => byId(name).classList.toggle("narrow", narrow.matches);
  narrow.addEventListener("change", apply);
  apply();
}

// ---- light and dark -------------------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];
const theme = byId("theme");

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  theme.textContent = `Theme: ${name}`;
  theme.dataset.theme = name;
}

function stored() {
  try {
    return localStorage.getItem("mpool-theme");
  } catch {
    return null; // the browser allows no storage
  }
}

setTheme(THEMES.includes(stored()) ? stored() : "auto");
theme.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(theme.dataset.theme) + 1) % THEMES.length];
  setTheme(next);
  try {
    localStorage.setItem("mpool-theme", next);
  } catch { /* the choice lasts as long as the page */ }
});
