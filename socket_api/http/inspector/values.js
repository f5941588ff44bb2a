// The keys and values of a version in figures, computed once somebody asks.

import { html, useEffect, useMemo, useRef, useState } from "./preact.js";
import { follow } from "./asking.js";
import { Matrix, Panel } from "./parts.js";
import { bytes, count, nameOf, plain, plural, routeOf, typed } from "./words.js";

const figure = (value) => (typeof value !== "number" ? "–" : value === 0 ? "0" : value.toPrecision(2));
const nameOfLayer = ({ path }) => `layer ${plain(path)}`;
const share = (value) => (value ? `${figure(100 * value)} %` : figure(value));

// Each: its name, how it is told, and the values of an array: one for each head, or one of all.
const FIGURES = [
  ["norm: root mean square", figure, (array) => array.rms?.mean ?? array.rms],
  ["drift from its parent, of the length", share, (array) => array.drift],
  ["outliers beyond 6 sigma", share, (array) => array.outliers?.share],
];

export function Values({ reference }) {
  const path = routeOf(reference, "/analysis");
  const [told, setTold] = useState(null); // null: nobody has asked
  const leaving = useRef(null);
  useEffect(() => () => leaving.current?.abort(), []);
  const compute = async () => {
    leaving.current = new AbortController();
    setTold({ done: 0, total: 0 });
    try {
      await follow(path, leaving.current, (event) => {
        if (event.error) throw new Error(event.error.message);
        setTold(event.result ? { path, value: JSON.parse(event.result.artifact) } : event);
      });
    } catch (error) {
      if (error.name !== "AbortError") setTold({ path, error: { status: error.status || 1, message: plain(error.message) }, again: compute });
    }
  };
  const asked = told?.path && told;
  return html`<${Panel} wide title="Values" asked=${asked} command=${`torpor analyze ${typed(reference)} --json`} note=${({ session, version, token_count }) => `${nameOf(session)}@${version}, ${plural(token_count, "token")}`}>
    ${asked
      ? (document) => html`<${Maps} document=${document} />`
      : told
        ? html`<p><progress max=${told.total || 1} value=${told.done} aria-label="How far it is"></progress> ${bytes(told.done)} of ${bytes(told.total)} are read</p>`
        : html`<p>Norm, drift and outliers of keys and values, by layer and head. Every byte is read for them, twice. <button onClick=${compute}>Compute them</button></p>`}
  <//>`;
}

function Maps({ document }) {
  const [chosen, setChosen] = useState(0);
  const [at, setAt] = useState([0, 0]);
  const [, show, of] = FIGURES[chosen];
  const { layers, columns, most } = useMemo(() => tableOf(document, of), [document, of]);
  const cell = (row, column) => {
    const { name, head, heads } = columns[column];
    const array = layers[row].arrays.find((one) => one.name === name);
    const value = array && [of(array)].flat()[head];
    return { part: value ? value / most : 0, text: show(value), says: `${nameOfLayer(layers[row])}, ${plain(name)}${heads > 1 ? `, head ${head}` : ""}: ${show(value)}${array?.why ? `, ${plain(array.why)}` : ""}` };
  };
  const place = [Math.min(at[0], layers.length - 1), Math.min(at[1], columns.length - 1)];
  const { drift } = document;
  return html`<div class="tools" role="radiogroup" aria-label="Figure">
      ${FIGURES.map(([name], index) => html`<label><input type="radio" name="figure" checked=${chosen === index} onChange=${() => setChosen(index)} />${name}</label>`)}
    </div>
    ${columns.length === 0
      ? html`<p class="empty">The model keeps nothing of which there are figures.</p>`
      : html`<${Matrix} label="Layers and heads" rows=${layers.map(nameOfLayer)} columns=${columns.map(({ name, head }) => head || plain(name))} cell=${cell} at=${place} onAt=${setAt} />
          <p>${cell(...place).says}. The largest is ${show(most)}.</p>`}
    <p class="small">${drift.why ? `There is no drift: ${plain(drift.why)}.` : `Drift is from @${drift.parent.version}, over ${plural(drift.common_tokens, "token")} in common.`}</p>`;
}

// The layers, with the drift of each array; the heads of each array as columns; the largest value.
function tableOf(document, of) {
  const drifts = new Map(document.drift.arrays.map((array) => [`${array.path} ${array.name}`, array.relative_l2]));
  const layers = document.layers.map(({ path, arrays }) => ({ path, arrays: arrays.map((array) => ({ ...array, drift: drifts.get(`${path} ${array.name}`) })) }));
  const heads = new Map();
  let most = 0;
  for (const array of layers.flatMap((layer) => layer.arrays)) {
    const values = [of(array)].flat();
    heads.set(array.name, Math.max(heads.get(array.name) ?? 0, values.length));
    most = Math.max(most, ...values.map((value) => value ?? 0));
  }
  const columns = [...heads].flatMap(([name, heads]) => Array.from({ length: heads }, (_, head) => ({ name, head, heads })));
  return { layers, columns, most };
}
