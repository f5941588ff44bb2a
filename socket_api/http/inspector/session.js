// One session: its state, the ribbon of its blocks, its last requests, and its versions.

import { html, useState } from "./preact.js";
import { Acts } from "./acts.js";
import { useAsked } from "./asking.js";
import { Empty, Facts, Marks, Panel, Table, Time } from "./parts.js";
import { State } from "./overview.js";
import { Ribbon } from "./ribbon.js";
import { bytes, causeOf, causeWord, count, nameOf, percent, plain, plainText, plural, routeOf, seconds, shortId, typed } from "./words.js";

const OFTEN_S = 5;
const SELDOM_S = 20;

export function Session({ name }) {
  const detail = useAsked(routeOf(name), OFTEN_S);
  const models = useAsked("/v1/models");
  const newest = detail.value?.versions.at(-1)?.version ?? null;
  const [chosen, setChosen] = useState(null);
  const [act, setAct] = useState({ name: null, point: null });
  const version = chosen ?? newest;
  const info = detail.value?.info;
  const why = useAsked(info ? routeOf(name, "/why") : null, OFTEN_S);
  return html`<nav class="crumbs" aria-label="Path"><a href="#/">Overview</a> <span aria-hidden="true">/</span> <b>${nameOf(name)}</b> <span aria-hidden="true">·</span> <a href=${`#/history/${encodeURIComponent(name)}`}>its history and its kin</a></nav>
    <h1>${nameOf(name)} ${info && html`<${State} state=${info.state} />`}</h1>
    <div class="beside"><${About} name=${name} detail=${detail} models=${models} /><${Identity} name=${name} detail=${detail} /></div>
    ${info && (version === null
      ? html`<${Panel} wide title="Blocks" command=${`torpor save ${typed(name)}`}><${Empty}>It is awake and has never slept. Blocks are of versions: a save or a sleep makes the first one.<//><//>`
      : html`<${Blocks} key=${version} name=${name} version=${version} onFork=${(point) => setAct({ name: "Fork", point })} />`)}
    ${info && html`<${Acts} detail=${detail.value} point=${act.point} chosen=${act.name} onChoose=${(name) => setAct({ name, point: null })} onDone=${detail.again} />`}
    ${info && html`<${Requests} name=${name} why=${why} />`}
    ${info && html`<${Versions} name=${name} versions=${detail.value.versions} asked=${detail} chosen=${version} onChoose=${setChosen} />`}`;
}

function Blocks({ name, version, onFork }) {
  const reference = `${name.replace(/^torpor:\/\//, "")}@${version}`;
  const asked = useAsked(routeOf(reference, "/blocks"), SELDOM_S);
  return html`<${Ribbon} session=${name} asked=${asked} version=${reference} onFork=${onFork} />`;
}

// --- what it is

function About({ name, detail, models }) {
  const info = detail.value?.info;
  const most = (models.value?.data ?? []).find((model) => model.id === info?.model)?.context_length;
  return html`<${Panel} title="State" asked=${detail} command=${`torpor show ${typed(name)}`}>
    ${info && html`<${Facts} facts=${[
      ["context", `${plural(info.token_count, "token")}${most ? ` of ${count(most)}, ${percent(info.token_count, most)}` : ""}`],
      ["model", plain(info.model)],
      ["in memory", info.resident_bytes ? bytes(info.resident_bytes) : "nothing"],
      ["last version", info.version === null ? "none yet" : html`@${info.version}, <${Time} ns=${info.slept_ns} />`],
      ["last used", info.used_ns ? html`<${Time} ns=${info.used_ns} />` : null],
      ["to read again", info.unread_tokens ? plural(info.unread_tokens, "token") : null],
      ["labels", info.labels.length ? html`<${Marks} marks=${info.labels.map((label) => [plain(label), "label"])} />` : null],
      ["comes from", origin(detail.value.provenance)],
    ]} />`}
  <//>`;
}

function origin(provenance) {
  const [from, way] = provenance.forked_from ? [provenance.forked_from, "forked from"] : [provenance.folded_from, "folded from"];
  if (!from) return "its own beginning";
  return html`${way} <a href=${`#/session/${encodeURIComponent(from.session.replace(/^torpor:\/\//, ""))}`}>${nameOf(from.session)}</a>@${from.version}, ${plural(from.tokens, "token")}`;
}

// Whether its state is what was computed, in words.
function exactness({ info, provenance }) {
  const told = [];
  if (info.lossy) told.push(`The first ${plural(info.lossy.tokens, "token")} were kept in ${info.lossy.bits} bits, and all later ones were computed from those.`);
  if (provenance.recomputed) {
    const part = provenance.recomputed;
    const same = part.same_logits ? "with the same logits" : "with other bits behind them";
    told.push(`${plural(part.tokens, "token")} from ${count(part.start)} on were computed again${part.damaged ? " after damage" : ""}, ${same}.`);
  }
  if (provenance.elsewhere_tokens) told.push(`The first ${plural(provenance.elsewhere_tokens, "token")} were computed by another backend.`);
  if (provenance.differs.length) told.push(`What computed it differs here in ${provenance.differs.map((part) => plain(part.field)).join(", ")}.`);
  return told.length ? told.join(" ") : "Exact: every token's state is the one that was computed. Each wake proves it by the canary.";
}

function Identity({ name, detail }) {
  const told = detail.value;
  return html`<${Panel} title="Identity" asked=${detail} command=${`torpor show ${typed(name)} --json`}>
    ${told && html`<p>${exactness(told)}</p>
      <details><summary>For which model it is good</summary>
        <${Facts} facts=${[...Object.entries(told.identity), ...Object.entries(told.backend)].map(([part, value]) => [plain(part).replaceAll("_", " "), html`<span class="mono" title=${plain(value)}>${plain(value).slice(0, 24)}</span>`])} />
      </details>
      <details><summary>Its layers</summary><p class="mono small">${told.layers.map(plain).join(", ") || "none"}</p></details>`}
  <//>`;
}

// --- its last requests

const REQUESTS = [
  { name: "When", size: "12ch", of: (row) => html`<${Time} ns=${row.at_ns} />` },
  { name: "Request", size: "11ch", from: 700, of: (row) => plain(row.cost?.verb || row.verb) },
  { name: "Client", size: "minmax(8ch, 0.4fr)", from: 1100, of: (row) => plain(row.cost?.client || "socket") },
  { name: "Outcome", size: "minmax(10ch, 1fr)", of: (row) => causeOf(causeWord(row)) },
  { name: "Read", right: true, size: "7ch", of: (row) => count(row.cost?.read_tokens) },
  { name: "Taken over", right: true, size: "11ch", from: 900, of: (row) => count(row.cost?.taken_over_tokens) },
  { name: "Written", right: true, size: "8ch", from: 480, of: (row) => count(row.cost?.written_tokens) },
  { name: "Time", right: true, size: "9ch", from: 480, of: (row) => (row.cost ? seconds(row.cost.seconds) : "–") },
];

function Requests({ name, why }) {
  const rows = [...(why.value?.requests ?? [])].reverse();
  const missed = rows.filter((row) => row.outcome === "diverged");
  return html`<${Panel} wide title="Last requests" asked=${why} command=${`torpor why ${typed(name)}`} note=${why.value && count(rows.length)}>
    ${rows.length === 0 ? html`<${Empty}>No request for it is known.<//>` : html`<${Table} label="Requests" columns=${REQUESTS} rows=${rows} keyOf=${(row) => row.at_ns} first=${{ name: "", down: false }} most=${8} />`}
    ${missed.map((row) => html`<${Miss} row=${row} />`)}
    ${why.value?.problem && html`<p class="failure">${why.value.problem}</p>`}
  <//>`;
}

export function Miss({ row }) {
  return html`<details class="miss">
    <summary><b>${causeOf(causeWord(row))}</b> at token ${count(row.position)}, <${Time} ns=${row.at_ns} /></summary>
    ${row.remedy && html`<p>${plain(row.remedy)}</p>`}
    <div class="sides">
      <div><span class="small">was there</span><pre dir="auto">${plainText(row.expected_text ?? "–")}</pre></div>
      <div><span class="small">was asked</span><pre dir="auto">${plainText(row.found_text ?? "–")}</pre></div>
    </div>
  </details>`;
}

// --- its versions

export const versionMarks = (version) => [
  ...version.tags.map((tag) => [plain(tag), "label", `tag ${plain(tag)}`]),
  ...(version.pinned ? [["pinned", "plain", "It is never pruned."]] : []),
  ...(version.stripped ? [["stripped", "warn", "It needs no keys and values; the next use reads the tokens again."]] : []),
  ...(version.lossy ? [[`≈ ${version.lossy.bits} bits`, "warn"]] : []),
];

function Versions({ name, versions, asked, chosen, onChoose }) {
  const columns = [
    {
      name: "Version",
      size: "12ch",
      of: (row) => html`<button class="link" tabindex="-1" aria-pressed=${row.version === chosen ? "true" : "false"} onClick=${() => onChoose(row.version)}>@${row.version}${row.version === chosen ? " ▸" : ""}</button>`,
    },
    { name: "Made", size: "14ch", of: (row) => html`<${Time} ns=${row.created_ns} />` },
    { name: "Tokens", size: "9ch", right: true, of: (row) => count(row.token_count) },
    { name: "Raw", size: "10ch", right: true, from: 700, of: (row) => bytes(row.logical_bytes) },
    { name: "Wrote", size: "10ch", right: true, from: 480, of: (row) => bytes(row.bundle_bytes) },
    { name: "Receipt", size: "14ch", from: 900, of: (row) => html`<span class="mono" title=${row.bundle_id}>${shortId(row.bundle_id)}</span>` },
    { name: "Marks", size: "minmax(10ch, 1fr)", from: 600, of: (row) => html`<${Marks} marks=${versionMarks(row)} />` },
  ];
  const rows = [...versions].reverse();
  return html`<${Panel} wide title="Versions" asked=${asked} command=${`torpor log ${typed(name)}`} note=${count(rows.length)}>
    ${rows.length === 0 ? html`<${Empty}>It has no version yet.<//>` : html`<${Table} label="Versions" columns=${columns} rows=${rows} keyOf=${(row) => row.version} first=${{ name: "", down: false }} most=${10}
      onOpen=${(row) => onChoose(row.version)} />`}
  <//>`;
}
