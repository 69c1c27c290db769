// Small SVG plots of values over time. The caption shows the latest values as text.
import { make, makeSvg, setText } from "./dom.js";

const WIDTH = 300, HEIGHT = 100;

// Round a value up to 1, 2 or 5 times a power of ten.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((step) => step >= value * 0.999999);
}

export class Plot {
  // title: title of the plot; names: names of its one or two curves; format: function that formats a value;
  // seconds: length of the time axis.
  constructor(title, names, format, seconds) {
    this.names = names;
    this.format = format;
    this.seconds = seconds;
    this.keys = names.map((name, at) => make("span", { class: at ? "key-second" : "key-first" }));
    this.curves = names.map((name, at) => makeSvg("path", { class: at ? "curve second" : "curve first" }));
    this.top = make("span");
    this.svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      ...[1, HEIGHT / 2, HEIGHT - 1].map((y) => makeSvg("line", { class: "axis", x1: 0, x2: WIDTH, y1: y, y2: y })),
      ...this.curves);
    this.figure = make("figure", {}, make("figcaption", {}, make("strong", {}, title), ...this.keys),
      make("div", { class: "ticks" }, this.top), this.svg,
      make("div", { class: "ticks" }, make("span", {}, `${seconds / 60} min ago`), make("span", {}, "now")));
  }

  // Draw samples [{time, values}], the newest last. A null value is a gap in its curve.
  show(samples) {
    const now = samples.length ? samples[samples.length - 1].time : 0;
    const seen = samples.flatMap((sample) => sample.values.filter((value) => value !== null));
    const top = roundUp(Math.max(0, ...seen));
    setText(this.top, this.format(top));
    this.curves.forEach((curve, at) => {
      let path = "", open = false;
      for (const sample of samples) {
        const value = sample.values[at];
        if (value === null) {
          open = false;
          continue;
        }
        const x = WIDTH * (1 - (now - sample.time) / this.seconds);
        const y = HEIGHT - 1 - (HEIGHT - 2) * value / top;
        path += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}${open ? "" : "h.1"}`;
        open = true;
      }
      curve.setAttribute("d", path);
      const last = samples.map((sample) => sample.values[at]).filter((value) => value !== null).pop();
      setText(this.keys[at], `${this.names[at]} ${last === undefined ? "–" : this.format(last)}`);
    });
  }
}
