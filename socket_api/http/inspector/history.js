// The history of all sessions as a graph, and the difference of two chosen points.

import { html, useMemo, useState } from "./preact.js";
import { useAsked } from "./asking.js";
import { Facts, Marks, Panel, Table, Time } from "./parts.js";
import { versionMarks } from "./session.js";
import { bare, bytes, count, hrefOf, nameOf, plain, plainText, plural, routeOf, typed, wordOf } from "./words.js";

const OFTEN_S = 10;
const LIMIT = 500;
const LANE_PX = 14;
const MOST_LANES = 12;
const TALL = 36;

const WAYS = { cut_off: "behind a version that is gone", branched: "branch", unknown: "its manifest cannot be read" };

export function History({ name }) {
  const asked = useAsked(`/v1/history?limit=${LIMIT}${name && `&sessions=${encodeURIComponent(name)}`}`, OFTEN_S);
  const [chosen, setChosen] = useState([]);
  const points = useMemo(() => pointsOf(asked.value), [asked.value]);
  const choose = ({ reference }) => reference && setChosen((before) => (before.includes(reference) ? before.filter((one) => one !== reference) : [...before, reference].slice(-2)));
  return html`<h1>${name ? html`History of <a href=${hrefOf(name)}>${nameOf(name)}</a> and its kin` : "History"}</h1>
    <${Panel} wide title="Versions" asked=${asked} command=${`torpor log --graph ${name && typed(name)}`}
      note=${({ left_out }) => `${count(points.length)}${left_out ? `, ${count(left_out)} older ones left out` : ""}`}
      empty=${() => points.length === 0 && "There is no version yet. A sleep or a save makes one."}>
      <p class="small">Choose two to compare, with a click or with arrow keys and Enter.</p>
      <${Table} label="History" columns=${columnsFor(points, chosen, choose)} rows=${points} keyOf=${(row) => row.id} onOpen=${choose} most=${14} />
    <//>
    ${chosen.length === 2 && html`<${Difference} key=${chosen.join()} one=${chosen[0]} other=${chosen[1]} />`}`;
}

const placeOf = (version, token) => (token === null ? "" : `: the first ${plural(token, "token")} of @${version}`);
const branchId = (number) => `branch ${number}`;

// What is in memory, then the versions; each with what it came from and its lanes. No branch of a tree is compared, nor
// what cannot be read.
function pointsOf(found) {
  if (!found) return [];
  const memory = found.in_memory.map(({ session, bundle_id, version, token_count, added_tokens, back_at, look, branch, parent }) => ({
    id: branch === null ? `memory ${session}` : branchId(branch),
    follows: parent === null ? bundle_id : branchId(parent),
    name: branch === null ? nameOf(session) : branchId(branch),
    reference: branch === null ? bare(session) : null,
    tokens: token_count,
    added: added_tokens,
    way: branch === null ? (back_at === null ? "in memory" : `${look ? "looks" : "went"} back${placeOf(version, back_at)}`) : `a branch of ${nameOf(session)}`,
    isMemory: true,
  }));
  const versions = found.entries.map((entry) => ({
    id: entry.bundle_id,
    follows: entry.origin?.bundle_id ?? entry.parent,
    name: `${nameOf(entry.session)}@${entry.version}`,
    reference: entry.way === "unknown" ? null : `${bare(entry.session)}@${entry.version}`,
    tokens: entry.token_count,
    added: entry.added_tokens,
    way: `${WAYS[entry.way] ?? wordOf(entry.way)}${entry.origin ? ` from ${nameOf(entry.origin.session)}@${entry.origin.version}` : placeOf(entry.parent_version, entry.back_at)}`,
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
    const lane = [lanes.indexOf(point.id), lanes.indexOf(null), lanes.length].find((place) => place >= 0);
    lanes = lanes.map((id) => (id === point.id ? null : id));
    lanes[lane] = there.has(point.follows) ? point.follows : null;
    while (lanes.length && lanes.at(-1) === null) lanes.pop();
    return { ...point, lane, above, below: [...lanes] };
  });
}

function Lanes({ point }) {
  const x = (lane) => (Math.min(lane, MOST_LANES) + 0.5) * LANE_PX;
  const goesOn = Boolean(point.below[point.lane]);
  const lines = point.above.map((id, lane) => (id === null ? "" : `M${x(lane)} 0L${id === point.id ? `${x(point.lane)} ${TALL / 2}` : `${x(lane)} ${TALL}`}`));
  if (goesOn) lines.push(`M${x(point.lane)} ${TALL / 2}V${TALL}`);
  return html`<svg class="lanes" width=${LANE_PX * (MOST_LANES + 1)} height=${TALL} aria-hidden="true">
    <path d=${lines.join("")} /><circle class=${point.isMemory ? "k-memory" : goesOn ? "k-alone" : "first"} cx=${x(point.lane)} cy=${TALL / 2} r="5" />
  </svg>`;
}

const signed = (added) => (added < 0 ? `−${count(-added)}` : added === null ? "–" : `+${count(added)}`);

function columnsFor(points, chosen, choose) {
  const lanes = Math.min(MOST_LANES, Math.max(1, ...points.map((point) => Math.max(point.lane + 1, point.below.length))));
  const isChosen = (row) => chosen.includes(row.reference);
  return [
    { name: "Graph", size: `${lanes * LANE_PX + 4}px`, of: (row) => html`<${Lanes} point=${row} />` },
    {
      name: "Version",
      size: "minmax(12ch, 1fr)",
      of: (row) => (row.reference ? html`<button class=${isChosen(row) ? "pick picked" : "pick"} tabindex="-1" aria-pressed=${isChosen(row) ? "true" : "false"} onClick=${() => choose(row)}>${row.name}</button>` : row.name),
    },
    { name: "How", size: "minmax(12ch, 1fr)", from: 900, of: (row) => row.way },
    { name: "When", size: "13ch", from: 520, of: (row) => (row.entry ? html`<${Time} ns=${row.entry.created_ns} />` : "now") },
    { name: "Added", size: "8ch", right: true, from: 420, of: (row) => signed(row.added) },
    { name: "Tokens", size: "8ch", right: true, of: (row) => count(row.tokens) },
    { name: "Written", size: "10ch", right: true, from: 760, of: (row) => bytes(row.entry?.bundle_bytes) },
    { name: "Marks", size: "minmax(8ch, 1fr)", from: 1100, of: (row) => row.entry && html`<${Marks} marks=${versionMarks(row.entry)} />` },
  ];
}

function Difference({ one, other }) {
  const asked = useAsked(`${routeOf(one, "/difference")}?other=${encodeURIComponent(other)}`);
  const isSame = (found) => found.one.differs_at === null && found.other.differs_at === null;
  return html`<${Panel} wide title=${`${nameOf(one)} and ${nameOf(other)}`} asked=${asked} command=${`torpor diff ${typed(one)} ${typed(other)}`}
    note=${(found) => (isSame(found) ? "the same tokens" : `${plural(found.common_tokens, "token")} in common`)}>
    ${(found) => html`<div class="sides"><${Side} side=${found.one} /><${Side} side=${found.other} /></div>
      ${found.cause && html`<p>Where they part: ${plain(found.cause)}.</p>`}
      <${Facts} facts=${found.facts.map((fact) => [`${plain(fact.kind)}: ${plain(fact.name)}`, `${plain(fact.one ?? "–")} → ${plain(fact.other ?? "–")}`])} />
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
    <pre dir="auto" tabindex="0">${found.lines.map((line) => html`<span class=${KINDS[line[0]] ?? ""}>${plainText(line)}${"\n"}</span>`)}</pre>
    ${found.lines_left_out > 0 && html`<p class="small">${plural(found.lines_left_out, "further line")} left out.</p>`}
  </details>`;
}
