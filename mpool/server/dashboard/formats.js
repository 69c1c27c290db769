// Formats of numbers and times.
export const whole = (count) => Math.round(count).toLocaleString("en");
// No line ends between a number and its unit.
export const bytes = (count) => count >= 1e9 ? `${(count / 1e9).toFixed(1)}\u00a0GB` : count >= 1e6 ? `${(count / 1e6).toFixed(0)}\u00a0MB`
  : count > 0 ? `${Math.ceil(count / 1e3)}\u00a0kB` : "0";
export const short = (count) => count >= 100 || count === 0 ? whole(count) : String(Number(count.toPrecision(2)));
export const rate = (count) => `${short(count)}/s`;
export const span = (seconds) => seconds === null ? "–" : seconds === 0 ? "0\u00a0s" : seconds < 1e-3 ? `${whole(seconds * 1e6)}\u00a0µs`
  : seconds < 1 ? `${Number((seconds * 1e3).toPrecision(3))}\u00a0ms` : seconds < 120 ? `${Number(seconds.toPrecision(3))}\u00a0s`
    : seconds < 7200 ? `${whole(seconds / 60)}\u00a0min` : `${whole(seconds / 3600)}\u00a0h`;
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

// Capability -> words for it.
export const CAPABILITY = { text_embedding: "text embedding", text_to_text: "text generation",
  image_embedding: "image embedding", vision: "vision", text_to_image: "image generation" };
// Capabilities that count images and not tokens.
export const IMAGES = ["text_to_image", "image_embedding"];
