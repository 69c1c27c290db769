// Formats of numbers and times.
export const whole = (count) => Math.round(count).toLocaleString("en");
export const bytes = (count) => count >= 1e9 ? `${(count / 1e9).toFixed(1)} GB` : count >= 1e6 ? `${(count / 1e6).toFixed(0)} MB`
  : count > 0 ? `${Math.ceil(count / 1e3)} kB` : "–";
export const rate = (count) => (count >= 100 ? whole(count) : String(Number(count.toPrecision(2)))) + "/s";
export const span = (seconds) => seconds === null ? "–" : seconds < 1e-3 ? `${whole(seconds * 1e6)} µs`
  : seconds < 1 ? `${Number((seconds * 1e3).toPrecision(3))} ms` : seconds < 120 ? `${Number(seconds.toPrecision(3))} s`
    : seconds < 7200 ? `${whole(seconds / 60)} min` : `${whole(seconds / 3600)} h`;
