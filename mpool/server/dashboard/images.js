// Images of the playground: chosen, dropped and pasted files, for the next message or to embed.
import { button, byId, make, say } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const LARGEST = 32e6, MOST = 256;

export let images = []; // [{name, url}]
let refusal = null; // why the chosen model takes no images, or null

export const thumbs = (some) => some.map(({ name, url }) => make("img", { src: url, alt: name, title: name }));

export function setImages(some) {
  images = some;
  byId("attached").replaceChildren(...some.map((image, at) => make("li", {}, ...thumbs([image]),
    button("\u00d7", () => {
      setImages(images.filter((_, index) => index !== at));
      (byId("attached").querySelectorAll("button")[Math.min(at, images.length - 1)] ?? byId("files")).focus();
    }, { "aria-label": `Remove ${image.name}` }))));
  byId("attached").hidden = !some.length;
}

// Accept images, or refuse them with a reason.
export function accept(reason) {
  refusal = reason;
  byId("attach").hidden = reason !== null;
  if (reason !== null) setImages([]);
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function fault(file) {
  if (!TYPES.includes(file.type)) return `${file.name} is not a PNG, JPEG, WebP, GIF or BMP image.`;
  return file.size <= LARGEST ? null
    : `${file.name} has ${Math.ceil(file.size / 1e6)} MB; an image may have ${LARGEST / 1e6} MB.`;
}

async function add(files) {
  if (refusal !== null) {
    say(refusal);
    return;
  }
  const all = [...files], faults = all.map(fault).filter(Boolean);
  try {
    const found = await Promise.all(all.filter((file) => !fault(file)).map(read));
    if (images.length + found.length > MOST) faults.push(`At most ${MOST} images.`);
    setImages([...images, ...found].slice(0, MOST));
  } catch (error) {
    faults.push(error.message);
  }
  say(faults.join(" "));
}

byId("files").addEventListener("change", () => {
  add(byId("files").files);
  byId("files").value = ""; // the next choice may be the same file
});

// ---- drop and paste -------------------------------------------------------------------------------------------------

const panel = byId("playground");
const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
let inside = 0; // every child that the pointer enters or leaves sends an event

function drag(change) {
  inside = Math.max(0, change);
  panel.classList.toggle("dropping", inside > 0 && refusal === null);
}

// Listen on the whole page: a browser opens a file that is dropped beside the panel, and the conversation is lost.
document.addEventListener("dragenter", (event) => hasFiles(event) && drag(inside + 1));
document.addEventListener("dragleave", (event) => hasFiles(event) && drag(inside - 1));
document.addEventListener("dragover", (event) => {
  if (hasFiles(event) && !panel.hidden) event.preventDefault();
});
document.addEventListener("drop", (event) => {
  drag(0);
  if (!hasFiles(event) || panel.hidden) return;
  event.preventDefault();
  add(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => {
  const data = event.clipboardData;
  if (panel.hidden || !data?.files.length || data.types.includes("text/plain")) return; // word processors copy both
  event.preventDefault();
  add(data.files);
});
