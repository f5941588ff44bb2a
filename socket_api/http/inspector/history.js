// The history of all sessions as a graph, and the difference of two chosen points.

import { html, useMemo, useState } from "./preact.js";
import { useAsked } from "./asking.js";
import { Empty, Facts, Marks, Panel, Table, Time } from "./parts.js";
import { versionMarks } from "./session.js";
import { bytes, causeOf, count, hrefOf, nameOf, plain, plainText, plural, routeOf, typed } from "./words.js";

const OFTEN_S = 10;
const LIMIT = 500;
const LANE_PX = 14;
const MOST_LANES = 12;
const TALL = 36;

const WAYS = {
  began: "began",
  went_on: "went on",
  went_back: "went back",
  cut_off: "its origin is gone",
  forked: "forked",
  folded: "folded",
  branched: "kept of a tree",
  imported: "imported",
  quantized: "in fewer bits",
  unknown: "its manifest cannot be read",
};

export function History({ session }) {
  const only = session ? `&sessions=${encodeURIComponent(session)}` : "";
  const asked = useAsked(`/v1/history?limit=${LIMIT}${only}`, OFTEN_S);
  const [chosen, setChosen] = useState([]);
  const points = useMemo(() => pointsOf(asked.value), [asked.value]);
  const choose = (point) => setChosen((before) => (before.includes(point.reference) ? before.filter((one) => one !== point.reference) : [...before, point.reference].slice(-2)));
  const command = `torpor log --graph${session ? ` ${typed(session)}` : ""}`;
  return html`<h1>${session ? html`History of <a href=${hrefOf(session)}>${nameOf(session)}</a> and its kin` : "History"}</h1>
    <${Panel} wide title="Versions" asked=${asked} command=${command}
      note=${asked.value && `${count(points.length)}${asked.value.left_out ? `, ${count(asked.value.left_out)} older ones left out` : ""}`}>
      ${points.length === 0
        ? html`<${Empty}>There is no version yet. A sleep or a save makes one.<//>`
        : html`<p class="small">Choose two to see how they differ: with a click, or with arrow keys and Enter.</p>
            <${Table} label="History" columns=${columnsFor(points, chosen, choose)} rows=${points} keyOf=${(row) => row.id} onOpen=${choose} most=${14} first=${{ name: "" }} />`}
      ${asked.value?.problems.map((problem) => html`<p class="failure">${problem.message}</p>`)}
    <//>
    ${chosen.length === 2 && html`<${Difference} key=${chosen.join()} one=${chosen[0]} other=${chosen[1]} />`}`;
}

const bare = (uri) => uri.replace(/^torpor:\/\//, "");

// What is in memory, and below it the versions; each with what it came from and its lanes.
function pointsOf(found) {
  if (!found) return [];
  const memory = found.in_memory
    .filter((state) => state.branch === null)
    .map((state) => ({
      id: `memory ${state.session}`,
      follows: state.bundle_id,
      reference: bare(state.session),
      session: state.session,
      tokens: state.token_count,
      added: state.added_tokens,
      way: state.look ? "a look back" : "in memory",
      isMemory: true,
    }));
  const versions = found.entries.map((entry) => ({
    id: entry.bundle_id,
    follows: entry.origin?.bundle_id ?? entry.parent,
    reference: `${bare(entry.session)}@${entry.version}`,
    session: entry.session,
    tokens: entry.token_count,
    added: entry.added_tokens,
    way: `${WAYS[entry.way] ?? plain(entry.way)}${entry.origin ? ` from ${nameOf(entry.origin.session)}@${entry.origin.version}` : ""}`,
    entry,
  }));
  return withLanes([...memory, ...versions]);
}

// Each point with its lane, the lanes above it and those below it. A lane is the id that it leads down to.
export function withLanes(points) {
  const there = new Set(points.map((point) => point.id));
  let lanes = [];
  return points.map((point) => {
    const above = [...lanes];
    let lane = lanes.indexOf(point.id);
    if (lane < 0) lane = lanes.indexOf(null) < 0 ? lanes.length : lanes.indexOf(null);
    lanes = lanes.map((id) => (id === point.id ? null : id));
    lanes[lane] = there.has(point.follows) ? point.follows : null;
    while (lanes.length && lanes.at(-1) === null) lanes.pop();
    return { ...point, lane, above, below: [...lanes] };
  });
}

function Lanes({ point }) {
  const x = (lane) => (Math.min(lane, MOST_LANES) + 0.5) * LANE_PX;
  const lines = [];
  point.above.forEach((id, lane) => {
    if (id === null) return;
    if (id === point.id) lines.push([x(lane), 0, x(point.lane), TALL / 2]);
    else lines.push([x(lane), 0, x(lane), TALL]);
  });
  if (point.below[point.lane]) lines.push([x(point.lane), TALL / 2, x(point.lane), TALL]);
  const kind = point.isMemory ? "memory" : point.below[point.lane] ? "version" : "first";
  return html`<svg class="lanes" width=${LANE_PX * (MOST_LANES + 1)} height=${TALL} aria-hidden="true">
    ${lines.map(([x1, y1, x2, y2]) => html`<line x1=${x1} y1=${y1} x2=${x2} y2=${y2} />`)}
    <circle class=${kind} cx=${x(point.lane)} cy=${TALL / 2} r="5" />
  </svg>`;
}

const signed = (added) => (added === null || added === undefined ? "–" : added < 0 ? `−${count(-added)}` : `+${count(added)}`);

function columnsFor(points, chosen, choose) {
  const lanes = Math.min(MOST_LANES, Math.max(1, ...points.map((point) => Math.max(point.lane + 1, point.below.length))));
  const isChosen = (row) => chosen.includes(row.reference);
  return [
    { name: "Graph", size: `${lanes * LANE_PX + 4}px`, of: (row) => html`<${Lanes} point=${row} />` },
    {
      name: "Version",
      size: "minmax(12ch, 1fr)",
      of: (row) => html`<button class=${isChosen(row) ? "pick picked" : "pick"} tabindex="-1" aria-pressed=${isChosen(row) ? "true" : "false"} onClick=${() => choose(row)}>${nameOf(row.reference)}</button>`,
    },
    { name: "How", size: "minmax(12ch, 1fr)", from: 900, of: (row) => row.way },
    { name: "When", size: "13ch", from: 520, of: (row) => (row.entry ? html`<${Time} ns=${row.entry.created_ns} />` : "now") },
    { name: "Added", size: "8ch", right: true, from: 420, of: (row) => signed(row.added) },
    { name: "Tokens", size: "8ch", right: true, of: (row) => count(row.tokens) },
    { name: "Wrote", size: "10ch", right: true, from: 760, of: (row) => (row.entry?.bundle_bytes === undefined ? "–" : bytes(row.entry.bundle_bytes)) },
    { name: "Marks", size: "minmax(8ch, 1fr)", from: 1100, of: (row) => (row.entry ? html`<${Marks} marks=${versionMarks(row.entry)} />` : "") },
  ];
}

// --- the difference of two points

function Difference({ one, other }) {
  const asked = useAsked(`${routeOf(one, "/difference")}?other=${encodeURIComponent(other)}`);
  const found = asked.value;
  const same = found && found.one.differs_at === null && found.other.differs_at === null;
  return html`<${Panel} wide title=${`${nameOf(one)} and ${nameOf(other)}`} asked=${asked} command=${`torpor diff ${typed(one)} ${typed(other)}`}
    note=${found && (same ? "the same tokens" : `${plural(found.common_tokens, "token")} in common`)}>
    ${found && html`<div class="sides"><${Side} side=${found.one} /><${Side} side=${found.other} /></div>
      ${found.cause && html`<p>Where they part: ${causeOf(found.cause)}.</p>`}
      ${found.facts.length > 0 && html`<${Facts} facts=${found.facts.map((fact) => [`${plain(fact.kind)}: ${plain(fact.name)}`, `${plain(fact.one ?? "–")} → ${plain(fact.other ?? "–")}`])} />`}
      ${found.no_text && html`<p class="empty">${found.no_text}</p>`}
      ${found.lines.length > 0 && html`<${Lines} found=${found} />`}`}
  <//>`;
}

function Side({ side }) {
  const name = side.version === null ? nameOf(side.session) : `${nameOf(side.session)}@${side.version}`;
  return html`<div><h3><a href=${hrefOf(side.session)}>${name}</a>${side.changed ? " and what came since" : ""}</h3>
    <${Facts} facts=${[
      ["tokens", count(side.token_count)],
      ["the first that differs", side.differs_at === null ? "none" : count(side.differs_at)],
      ["blocks of its own", `${count(side.alone_blocks)}, ${bytes(side.alone_bytes)} raw`],
    ]} /></div>`;
}

const KINDS = { "+": "added", "-": "removed", "@": "place" };

// The texts behind the place where they part, once they are to be seen.
function Lines({ found }) {
  return html`<details class="miss"><summary>Show the lines: ${count(found.lines_added)} added, ${count(found.lines_removed)} removed</summary>
    <pre class="lines" dir="auto" tabindex="0">${found.lines.map((line) => html`<span class=${KINDS[line[0]] ?? ""}>${plainText(line)}${"\n"}</span>`)}</pre>
    ${found.lines_left_out > 0 && html`<p class="small">${plural(found.lines_left_out, "further line")} left out.</p>`}
  </details>`;
}
