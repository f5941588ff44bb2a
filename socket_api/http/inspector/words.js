// Numbers, times and names in words, as the commands write them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(size, unknown = "–") {
  if (size === undefined || size === null) return unknown;
  let unit = 0;
  let value = size;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  if (unit === 0) return `${value} B`;
  const digits = value < 10 ? 2 : value < 100 ? 1 : 0;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

export const count = (value) => (value === undefined || value === null ? "–" : value.toLocaleString("en-US"));
export const sum = (things, of) => things.reduce((total, thing) => total + of(thing), 0);
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole) || (part ? "under 1" : 0)} %` : "–");
export const seconds = (value) => (value >= 100 ? `${Math.round(value)} s` : value >= 1 ? `${value.toFixed(1)} s` : `${Math.round(value * 1000)} ms`);
export const shortId = (id) => (id ? id.slice(0, 12) : "–");

const STEPS = [
  [60, "s"],
  [60, "min"],
  [24, "h"],
  [365, "days"],
];

export function ago(ns, nowMs = Date.now()) {
  let value = Math.max(0, (nowMs - ns / 1e6) / 1000);
  if (value < 5) return "just now";
  for (const [most, unit] of STEPS) {
    if (value < most) return `${Math.floor(value)} ${unit === "days" && Math.floor(value) === 1 ? "day" : unit} ago`;
    value /= most;
  }
  return `${Math.floor(value)} years ago`;
}

// To the minute.
export const clock = (ns) => new Date(ns / 1e6).toLocaleString("en-CA", { hour12: false, dateStyle: "short", timeStyle: "short" });
export const exactly = (ns) => new Date(ns / 1e6).toLocaleString("en-CA", { hour12: false, timeZoneName: "short" });

const LEFT_TO_RIGHT = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

const shown = (text, kept) => String(text).replace(LEFT_TO_RIGHT, (mark) => (kept.includes(mark) ? mark : `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`));
// A name or a line, in which no mark steers how it is read: each shows as its code.
export const plain = (text) => shown(text, "");
// A text of several lines: these stay, and tabs.
export const plainText = (text) => shown(text, "\n\t");

export const bare = (uri) => uri.replace(/^torpor:\/\//, "");
// A session without what all of this page's sessions have.
export const nameOf = (uri) => plain(bare(uri).replace(/^default\//, ""));
// As a shell takes it: letters, digits and a few signs need no quotes.
export const typed = (uri) => {
  const name = nameOf(uri);
  return /^[\w./@~:-]+$/.test(name) ? name : `'${name.replaceAll("'", "'\\''")}'`;
};

export const routeOf = (uri, more = "") => `/v1/sessions/${encodeURIComponent(bare(uri))}${more}`;
export const hrefOf = (uri, view = "session") => `#/${view}/${encodeURIComponent(bare(uri))}`;

const ROLES = { assistant: "answer", tool: "tool result" };
export const roleOf = (role) => role.split("+").map((one) => ROLES[one] ?? one).join(" + ");

// A word of the daemon, as a command writes it.
export const wordOf = (name) => plain(name).replaceAll("_", " ");
