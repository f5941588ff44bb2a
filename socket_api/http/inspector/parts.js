// What views are made of: panels, bars, times, and a table that draws the rows in sight alone.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./preact.js";
import { ago, bytes, exactly } from "./words.js";

const ROW_PX = 36;
const BEYOND = 8; // rows above and below those in sight
const TICK_MS = 10000;

// A part of a view. asked: where its figures are from; command: what prints the same.
export function Panel({ title, asked, command, note, children, wide }) {
  const waits = asked && asked.value === undefined && !asked.error;
  return html`<section class=${wide ? "panel wide" : "panel"} aria-busy=${waits ? "true" : "false"}>
    <header>
      <h2>${title}</h2>
      ${note && html`<span class="note">${note}</span>`}
    </header>
    ${asked?.error && html`<${Failure} asked=${asked} />`}
    ${waits ? html`<${Loading} />` : asked && asked.value === undefined ? null : children}
    <footer>
      ${asked?.value !== undefined && html`<button class="link" onClick=${() => openJson(asked.value)} title=${asked.path}>JSON</button>`}
      ${command && html`<code>${command}</code>`}
    </footer>
  </section>`;
}

function openJson(value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: "application/json" }));
  window.open(url, "_blank", "noopener");
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

const Loading = () => html`<div class="loading"><span></span><span></span><span></span></div>`;

function Failure({ asked }) {
  const lost = asked.error.status === 0;
  const stays = asked.value !== undefined ? " What you see is from before." : "";
  return html`<p class="failure" role="status">
    ${lost ? `The daemon does not answer; trying again.${stays}` : asked.error.message}
    ${!lost && html` <button onClick=${asked.again}>Try again</button>`}
  </p>`;
}

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

// How long ago, with the exact time on hover.
export function Time({ ns }) {
  const [, setTick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || setTick((before) => before + 1), TICK_MS);
    return () => clearInterval(timer);
  }, []);
  if (!ns) return "–";
  return html`<time datetime=${new Date(ns / 1e6).toISOString()} title=${exactly(ns)}>${ago(ns)}</time>`;
}

// Parts of a whole, as a bar and in words. Each part: [name, value, kind].
export function Bar({ parts, label, show = bytes }) {
  const shown = parts.filter(([, value]) => value > 0);
  return html`<div class="bar" role="img" aria-label=${`${label}: ${shown.map(([name, value]) => `${name} ${show(value)}`).join(", ")}`}>
      ${shown.map(([name, value, kind]) => html`<span class=${`k-${kind}`} style=${{ flexGrow: value }} title=${`${name}: ${show(value)}`}></span>`)}
    </div>
    <dl class="parts">
      ${parts.map(([name, value, kind]) => html`<div><dt><i class=${`k-${kind}`}></i>${name}</dt><dd>${show(value)}</dd></div>`)}
    </dl>`;
}

export const Facts = ({ facts }) =>
  html`<dl class="facts">${facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

export const Marks = ({ marks }) =>
  marks.map(([text, kind, title]) => html`<span class=${`mark m-${kind}`} title=${title ?? text}>${text}</span>`);

// The width of the window, in CSS pixels.
export function useWidth() {
  const [width, setWidth] = useState(window.innerWidth);
  useEffect(() => {
    const tell = () => setWidth(window.innerWidth);
    window.addEventListener("resize", tell);
    return () => window.removeEventListener("resize", tell);
  }, []);
  return width;
}

// A table of many rows. Each column: { name, of: row -> content, sort: row -> value, size, right, from }; from: the width
// of the window where it begins to be shown. onOpen: what Enter on a row does. foot: rows that stay below.
export function Table({ label, columns, rows, keyOf, onOpen, foot = [], first, most = 16 }) {
  const width = useWidth();
  const shown = columns.filter((column) => width >= (column.from ?? 0));
  const [order, setOrder] = useState(first ?? { name: columns[0].name, down: false });
  const sorted = sortedBy(rows, columns.find((column) => column.name === order.name), order.down);
  const [top, setTop] = useState(0);
  const [at, setAt] = useState(0);
  const scroller = useRef(null);
  const inSight = Math.min(sorted.length, most);
  const from = Math.max(0, Math.floor(top / ROW_PX) - BEYOND);
  const drawn = sorted.slice(from, from + inSight + 2 * BEYOND);
  const current = Math.min(at, sorted.length - 1);
  const grid = { gridTemplateColumns: shown.map((column) => column.size ?? "9ch").join(" ") };
  const below = foot.length * ROW_PX;
  useLayoutEffect(() => {
    const box = scroller.current;
    const seen = box.clientHeight - ROW_PX - below;
    if (current * ROW_PX < box.scrollTop) box.scrollTop = current * ROW_PX;
    else if ((current + 1) * ROW_PX > box.scrollTop + seen) box.scrollTop = (current + 1) * ROW_PX - seen;
  }, [at]);
  const move = (event) => {
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: inSight - 1, PageUp: 1 - inSight, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" && event.target === scroller.current && sorted[current]) onOpen?.(sorted[current]);
    if (!(event.key in steps)) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(sorted.length - 1, current + steps[event.key])));
  };
  const cells = (of) => shown.map((column) => html`<div role="gridcell" class=${column.right ? "right" : ""}>${of(column)}</div>`);
  return html`<div class="table" role="grid" tabindex="0" ref=${scroller} aria-label=${label} aria-rowcount=${sorted.length + 1 + foot.length}
    aria-activedescendant=${sorted.length ? `${label}-${current}` : null} style=${{ maxHeight: `${(most + 1) * ROW_PX + below + 2}px` }}
    onScroll=${(event) => setTop(event.currentTarget.scrollTop)} onKeyDown=${move}>
    <div class="row head" role="row" aria-rowindex="1" style=${grid}>
      ${shown.map((column) => html`<${Heading} column=${column} order=${order} onOrder=${setOrder} />`)}
    </div>
    <div class="height" role="rowgroup" style=${{ height: `${sorted.length * ROW_PX}px` }}>
      ${drawn.map((row, offset) => html`<div key=${keyOf(row)} id=${`${label}-${from + offset}`} role="row" aria-rowindex=${from + offset + 2}
        aria-selected=${from + offset === current ? "true" : "false"} class="row" style=${{ ...grid, top: `${(from + offset) * ROW_PX}px` }}
        onClick=${() => setAt(from + offset)}>${cells((column) => column.of(row))}</div>`)}
    </div>
    <div class="foot" role="rowgroup">
      ${foot.map((row, index) => html`<div class="row" role="row" aria-rowindex=${sorted.length + 2 + index} style=${grid}>${cells((column) => row[column.name] ?? "")}</div>`)}
    </div>
  </div>`;
}

function Heading({ column, order, onOrder }) {
  const is = order.name === column.name;
  const turn = () => onOrder({ name: column.name, down: is ? !order.down : Boolean(column.right) });
  return html`<div role="columnheader" class=${column.right ? "right" : ""} aria-sort=${is ? (order.down ? "descending" : "ascending") : "none"}>
    ${column.sort ? html`<button onClick=${turn} title=${column.title ?? ""}>${column.name}${is ? (order.down ? " ↓" : " ↑") : ""}</button>` : column.name}
  </div>`;
}

function sortedBy(rows, column, down) {
  if (!column?.sort) return rows;
  const sign = down ? -1 : 1;
  const values = new Map(rows.map((row) => [row, column.sort(row)]));
  return [...rows].sort((one, other) => {
    const [a, b] = [values.get(one), values.get(other)];
    return a === b ? 0 : a < b ? -sign : sign;
  });
}
