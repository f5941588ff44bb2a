// What views are made of.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./preact.js";
import { isFile } from "./asking.js";
import { ago, bytes, count, exactly, hrefOf, nameOf, plain } from "./words.js";

const ROW_PX = 36;
const BEYOND = 8; // rows above and below those in sight
const PROBLEMS = 3; // shown of a record

// A part of a view. asked: where its figures are from; note, empty and children may be functions of these, which are
// called once they are there. empty: what to say in place of the children. command: what prints the same. more: [asked,
// command] of further figures.
export function Panel({ title, asked, command, more = [], note, empty, children, wide }) {
  const { value, error } = asked ?? {};
  const waits = asked && value === undefined && !error;
  const told = (part) => (typeof part !== "function" ? part : value === undefined ? null : part(value));
  const nothing = told(empty);
  const problems = [...(value?.problems ?? []).map((problem) => problem.message), value?.problem].filter(Boolean);
  return html`<section class=${wide ? "panel wide" : "panel"} aria-busy=${waits ? "true" : "false"}>
    <header><h2>${title}</h2><span class="note">${told(note)}</span></header>
    ${error && html`<${Failure} asked=${asked} />`}
    ${waits ? html`<div class="loading"></div>` : asked && value === undefined ? null : nothing ? html`<p class="empty">${nothing}</p>` : told(children)}
    ${problems.slice(0, PROBLEMS).map((problem) => html`<p class="failure">${plain(problem)}</p>`)}
    ${problems.length > PROBLEMS && html`<p class="small">and ${count(problems.length - PROBLEMS)} more</p>`}
    <footer>
      ${[[asked, command], ...more].map(([asked, command]) => html`<span>
        ${asked?.value !== undefined && html`<button class="link" onClick=${() => openJson(asked.value)} title=${asked.path}>JSON</button>`} ${command && html`<code>${command}</code>`}
      </span>`)}
    </footer>
  </section>`;
}

function openJson(value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 2)], { type: "application/json" }));
  window.open(url, "_blank", "noopener");
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

function Failure({ asked }) {
  if (asked.error.status) return html`<p class="failure" role="status">${asked.error.message} ${!isFile && html`<button onClick=${asked.again}>Try again</button>`}</p>`;
  return html`<p class="failure" role="status">The daemon does not answer; trying again.${asked.value === undefined ? "" : " What you see is from before."}</p>`;
}

// How long ago, with the exact time on hover.
export const Time = ({ ns }) => (ns ? html`<time title=${exactly(ns)}>${ago(ns)}</time>` : "–");

export const Names = ({ names }) => names.map((name, at) => html`${at ? ", " : ""}<a href=${hrefOf(name)}>${nameOf(name)}</a>`);

// What colors stand for: each [class, name, what to say of it].
export const Legend = ({ parts }) =>
  html`<dl class="parts">${parts.map(([kind, name, told]) => html`<div><dt><i class=${kind}></i>${name}</dt><dd>${told}</dd></div>`)}</dl>`;

// Parts of a whole in bytes, as a bar and in words. Each part: [class, name, bytes].
export function Bar({ parts, label }) {
  const told = parts.map(([kind, name, size]) => [kind, name, bytes(size)]);
  return html`<div class="bar" role="img" aria-label=${`${label}: ${told.map(([, name, size]) => `${name} ${size}`).join(", ")}`}>
      ${parts.map(([kind, name, size], at) => size > 0 && html`<span class=${kind} style=${{ flexGrow: size }} title=${`${name}: ${told[at][2]}`}></span>`)}
    </div>
    <${Legend} parts=${told} />`;
}

// Facts by name; one that is nothing is left out.
export const Facts = ({ facts }) =>
  html`<dl class="facts">${facts.filter(([, value]) => value).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

export const Marks = ({ marks }) =>
  marks.map(([text, kind, title]) => html`<span class=${`mark m-${kind}`} title=${title ?? text}>${text}</span>`);

// Where a key leads from the item `at` of so many; steps: by key.
export function moved(event, at, count, steps) {
  const step = { Home: -Infinity, End: Infinity, ...steps }[event.key];
  if (step !== undefined) event.preventDefault();
  return Math.max(0, Math.min(count - 1, at + (step ?? 0)));
}

// A table that draws the rows in sight alone. Each column: { name, of: row -> content, sort: row -> value, size, right, sum:
// row of the foot -> content, from: the width of the window where it is shown }. onOpen: what Enter on a row does. first:
// { name, down } of the column to sort by; else the order stays.
export function Table({ label, columns, rows, keyOf, onOpen, foot = [], first = {}, most = 16 }) {
  const [width, setWidth] = useState(window.innerWidth);
  useEffect(() => {
    const tell = () => setWidth(window.innerWidth);
    window.addEventListener("resize", tell);
    return () => window.removeEventListener("resize", tell);
  }, []);
  const shown = columns.filter((column) => width >= (column.from ?? 0));
  const [order, setOrder] = useState(first);
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
  const press = (event) => {
    if (event.key === "Enter" && event.target === scroller.current && sorted[current]) onOpen?.(sorted[current]);
    setAt(moved(event, current, sorted.length, { ArrowDown: 1, ArrowUp: -1, PageDown: inSight - 1, PageUp: 1 - inSight }));
  };
  const row = (index, more, of) => html`<div class="row" role="row" aria-rowindex=${index} style=${grid} ...${more}>
    ${shown.map((column, at) => html`<div role="gridcell" class=${column.right ? "right" : ""}>${of(column, at)}</div>`)}</div>`;
  return html`<div class="table" role="grid" tabindex="0" ref=${scroller} aria-label=${label} aria-rowcount=${sorted.length + 1 + foot.length}
    aria-activedescendant=${sorted.length ? `${label}-${current}` : null} style=${{ maxHeight: `${(most + 1) * ROW_PX + below + 2}px` }}
    onScroll=${(event) => setTop(event.currentTarget.scrollTop)} onKeyDown=${press}>
    <div class="row head" role="row" aria-rowindex="1" style=${grid}>
      ${shown.map((column) => html`<${Heading} column=${column} order=${order} onOrder=${setOrder} />`)}
    </div>
    <div class="height" role="rowgroup" style=${{ height: `${sorted.length * ROW_PX}px` }}>
      ${drawn.map((each, offset) => {
        const index = from + offset;
        const place = { key: keyOf(each), id: `${label}-${index}`, "aria-selected": index === current ? "true" : "false", onClick: () => setAt(index) };
        return row(index + 2, { ...place, style: { ...grid, top: `${index * ROW_PX}px` } }, (column) => column.of(each));
      })}
    </div>
    <div class="foot" role="rowgroup">
      ${foot.map((each, index) => row(sorted.length + 2 + index, {}, (column, at) => (at ? column.sum?.(each) : each.name)))}
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

// Figures by row and column, in one color. rows, columns: names; link: of a row. cell(row, column) -> { part: of the full
// color, 0 to 1; text; says }. at: the chosen [row, column].
export function Matrix({ label, rows, columns, link, cell, at, onAt }) {
  const press = (event) => onAt([moved(event, at[0], rows.length, { ArrowDown: 1, ArrowUp: -1 }), moved(event, at[1], columns.length, { ArrowRight: 1, ArrowLeft: -1 })]);
  const grid = { gridTemplateColumns: `min(20ch, 30vw) repeat(${columns.length}, 5ch)` };
  return html`<div class="matrix" role="grid" tabindex="0" aria-label=${`${label}: arrow keys move`} aria-activedescendant=${`cell-${at.join("-")}`} onKeyDown=${press}>
    <div class="line" role="row" style=${grid}><div role="gridcell"></div>${columns.map((name) => html`<div role="columnheader" class="small">${name}</div>`)}</div>
    ${rows.map((name, row) => html`<div class="line" role="row" style=${grid}>
      <div role="rowheader" title=${name}>${link ? html`<span class="small">${row + 1}</span> <a href=${link(row)} tabindex="-1">${name}</a>` : name}</div>
      ${columns.map((_, column) => {
        const { part, text, says } = cell(row, column);
        return html`<div role="gridcell" id=${`cell-${row}-${column}`} aria-selected=${at[0] === row && at[1] === column ? "true" : "false"} class=${part > 0.42 ? "cell full" : "cell"}
          title=${says} aria-label=${says} onClick=${() => onAt([row, column])}><i class="k-shared" style=${{ opacity: part && 0.15 + 0.85 * part }}></i><span aria-hidden="true">${text}</span></div>`;
      })}
    </div>`)}
  </div>`;
}
