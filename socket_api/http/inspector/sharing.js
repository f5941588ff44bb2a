// Which sessions share how much: a matrix over their blocks, and who holds the blocks of a pair.

import { html, useEffect, useMemo, useState } from "./preact.js";
import { ask, useAsked } from "./asking.js";
import { Empty, Panel } from "./parts.js";
import { bytes, count, hrefOf, nameOf, plural, routeOf, shortId, typed } from "./words.js";

const MOST = 20; // sessions in the matrix: those with the most to share
const CELL = 34;

// The blocks of the chosen sessions, asked one after the other: { session: Map(block id -> block) }.
function useBlocks(names) {
  const [found, setFound] = useState({ of: "", blocks: new Map(), problems: [] });
  const key = names.join("\n");
  useEffect(() => {
    const leaving = new AbortController();
    (async () => {
      const [blocks, problems] = [new Map(), []];
      for (const name of names) {
        try {
          const told = await ask(routeOf(name, "/blocks"), { signal: leaving.signal });
          blocks.set(name, new Map(told.blocks.map((block) => [block.block_id, block])));
        } catch (error) {
          if (error.name === "AbortError") return;
          problems.push(`${nameOf(name)}: ${error.message}`);
        }
      }
      setFound({ of: key, blocks, problems });
    })();
    return () => leaving.abort();
  }, [key]);
  return found.of === key ? found : null;
}

const sizeOf = (block) => block.stored_bytes ?? block.logical_bytes;

function common(one, other) {
  return [...one.values()].filter((block) => other.has(block.block_id));
}

export function Sharing() {
  const sessions = useAsked("/v1/sessions");
  const stored = useMemo(() => (sessions.value?.sessions ?? []).filter((info) => info.version !== null), [sessions.value]);
  const names = useMemo(() => [...stored].sort((a, b) => b.token_count - a.token_count).slice(0, MOST).map((info) => info.session).sort(), [stored]);
  const found = useBlocks(names);
  const [pair, setPair] = useState([0, 1]);
  const left = stored.length - names.length;
  const known = names.filter((name) => found?.blocks.has(name));
  return html`<h1>Sharing</h1>
    <${Panel} wide title="Bytes in common" asked=${sessions} command="torpor du" note=${sessions.value && `the newest versions of ${plural(names.length, "session")}${left ? `, ${count(left)} smaller ones left out` : ""}`}>
      ${names.length < 2
        ? html`<${Empty}>Two sessions that sleep or were saved are needed. A fork shares all of its blocks.<//>`
        : !found
          ? html`<p class="small">reading their blocks …</p>`
          : known.length < 2
            ? html`<${Empty}>The blocks of these sessions cannot be read.<//>`
            : html`<${Matrix} names=${known} blocks=${found.blocks} pair=${pair} onPair=${setPair} />`}
      ${found?.problems.map((problem) => html`<p class="failure">${problem}</p>`)}
    <//>
    ${known.length > 1 && html`<${Pair} one=${known[Math.min(pair[0], known.length - 1)]} other=${known[Math.min(pair[1], known.length - 1)]} blocks=${found.blocks} />`}`;
}

function Matrix({ names, blocks, pair, onPair }) {
  const sums = useMemo(() => names.map((one) => names.map((other) => common(blocks.get(one), blocks.get(other)).reduce((sum, block) => sum + sizeOf(block), 0))), [names.join(), blocks]);
  const move = (event) => {
    const steps = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
    if (!(event.key in steps)) return;
    event.preventDefault();
    onPair(pair.map((at, axis) => Math.max(0, Math.min(names.length - 1, at + steps[event.key][axis]))));
  };
  const columns = { gridTemplateColumns: `minmax(9ch, 20ch) repeat(${names.length}, ${CELL}px)` };
  const at = (row, column) => pair[0] === row && pair[1] === column;
  return html`<div class="matrix" role="grid" tabindex="0" aria-label="Bytes that two sessions share: arrow keys move" aria-activedescendant=${`pair-${pair[0]}-${pair[1]}`} onKeyDown=${move}>
    <div class="line" role="row" style=${columns}><div role="columnheader"><span class="hidden">session</span></div>
      ${names.map((name, at) => html`<div role="columnheader" class="small" title=${nameOf(name)}>${at + 1}</div>`)}</div>
    ${names.map((one, row) => html`<div class="line" role="row" style=${columns}>
      <div role="rowheader"><span class="small">${row + 1}</span> <a href=${hrefOf(one)} tabindex="-1" title=${nameOf(one)}>${nameOf(one)}</a></div>
      ${names.map((other, column) => {
        const whole = Math.max(1, sums[row][row]);
        const part = sums[row][column] / whole;
        return html`<div role="gridcell" id=${`pair-${row}-${column}`} aria-selected=${at(row, column) ? "true" : "false"} class="cell" onClick=${() => onPair([row, column])}
          title=${`${nameOf(one)} and ${nameOf(other)}: ${bytes(sums[row][column])}`} aria-label=${`${nameOf(one)} and ${nameOf(other)}: ${bytes(sums[row][column])}`}>
          <i style=${{ opacity: part ? 0.15 + 0.85 * part : 0 }}></i><span aria-hidden="true">${part ? Math.round(100 * part) : ""}</span></div>`;
      })}
    </div>`)}
  </div>
  <p class="small">A cell has how many percent of the row's session the column's session has, too.</p>`;
}

function Pair({ one, other, blocks }) {
  const shared = common(blocks.get(one), blocks.get(other));
  const holders = (block) => [...blocks].filter(([, its]) => its.has(block.block_id)).map(([name]) => name);
  const total = shared.reduce((sum, block) => sum + sizeOf(block), 0);
  return html`<${Panel} wide title=${one === other ? nameOf(one) : `${nameOf(one)} and ${nameOf(other)}`} command=${shared.length ? `torpor who ${shortId(shared[0].block_id)}` : `torpor diff ${typed(one)} ${typed(other)} --stat`}
    note=${`${plural(shared.length, "block")}, ${bytes(total)} in common`}>
    ${shared.length === 0
      ? html`<${Empty}>They have no block in common.<//>`
      : html`<ul class="holders">${shared.map((block) => html`<li><b>${count(block.start)} to ${count(block.start + block.tokens)}</b>
          <span>${bytes(sizeOf(block))}</span><span class="mono">${shortId(block.block_id)}</span>
          <span class="small">held by ${holders(block).map((name, at) => html`${at ? ", " : ""}<a href=${hrefOf(name)}>${nameOf(name)}</a>`)}</span></li>`)}</ul>`}
  <//>`;
}
