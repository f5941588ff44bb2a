// One session: its state, the ribbon of its blocks, its last requests, and its versions.

import { html, useState } from "./preact.js";
import { Acts } from "./acts.js";
import { isFile, isOwner, known, useAsked } from "./asking.js";
import { Facts, Marks, Panel, Table, Time } from "./parts.js";
import { State } from "./overview.js";
import { Ribbon } from "./ribbon.js";
import { Values } from "./values.js";
import { bare, bytes, count, hrefOf, nameOf, percent, plain, plainText, plural, routeOf, seconds, shortId, typed, wordOf } from "./words.js";

const OFTEN_S = 5;

export function Session({ name }) {
  const detail = useAsked(routeOf(name), OFTEN_S);
  const models = useAsked(known("/v1/models"));
  const newest = detail.value?.versions.at(-1)?.version ?? null;
  const [chosen, setChosen] = useState(null);
  const [act, setAct] = useState({ name: null, point: null });
  const info = detail.value?.info;
  const version = chosen?.version;
  // What it holds now, or a chosen version.
  const reference = version ? `${bare(name)}@${version}` : bare(name);
  const why = useAsked(info ? routeOf(name, "/why") : null, OFTEN_S);
  return html`<h1>${nameOf(name)} ${info && html`<${State} state=${info.state} />`}</h1>
    <${About} name=${name} detail=${detail} models=${models} />
    ${info && (newest === null
      ? html`<${Panel} wide title="Blocks" command=${`torpor save ${typed(name)}`} empty="It has never slept: a save or a sleep makes its first version." />`
      : html`<${Ribbon} key=${reference + newest} reference=${reference} chosen=${chosen} onFork=${(point) => setAct({ name: "Fork", point })} />`)}
    ${info && !isFile && html`<${Acts} detail=${detail.value} point=${act.point} chosen=${act.name} onChoose=${(name) => setAct({ name, point: null })} onDone=${detail.again} />`}
    ${info && html`<${Requests} name=${name} why=${why} />
      <${Versions} name=${name} asked=${detail} chosen=${version} onChoose=${(one) => setChosen({ version: one === version ? null : one })} />`}
    ${info && newest !== null && isOwner() && !isFile && html`<${Values} key=${version ?? newest} reference=${`${bare(name)}@${version ?? newest}`} />`}`;
}

function About({ name, detail, models }) {
  const mostOf = (info) => (models.value?.data ?? []).find((model) => model.id === info.model)?.context_length;
  return html`<${Panel} wide title="State" asked=${detail} command=${`torpor show ${typed(name)}`}>
    ${({ info, versions, provenance, identity, backend, layers, damaged }) => html`<div class="sides"><${Facts} facts=${[
      ["context", `${plural(info.token_count, "token")}${mostOf(info) ? ` of ${count(mostOf(info))}, ${percent(info.token_count, mostOf(info))}` : ""}`],
      ["model", plain(info.model)],
      ["machine", info.machine && plain(info.machine)],
      ["in memory", info.resident_bytes ? bytes(info.resident_bytes) : "nothing"],
      ["last version", versions.length ? html`@${versions.at(-1).version}, <${Time} ns=${info.slept_ns} />` : "none yet"],
      ["last used", info.used_ns && html`<${Time} ns=${info.used_ns} />`],
      ["to read again", info.unread_tokens && plural(info.unread_tokens, "token")],
      ["labels", info.labels.length && html`<${Marks} marks=${info.labels.map((label) => [plain(label), "label"])} />`],
      ["comes from", origin(provenance)],
      ["history", !isFile && html`<a href=${hrefOf(name, "history")}>its versions and its kin</a>`],
    ]} />
    <div><p>${damaged ? html`A part of it is damaged or missing: <code>torpor verify ${typed(name)}</code> says what to do.` : exactness({ info, provenance })}</p>
      <details><summary>Its model and backend</summary>
        <${Facts} facts=${[...Object.entries(identity), ...Object.entries(backend)].map(([part, value]) => [wordOf(part), html`<span class="mono">${plain(value)}</span>`])} />
      </details>
      <details><summary>Its layers</summary><p class="mono small">${layers.map(plain).join(", ") || "none"}</p></details></div></div>`}
  <//>`;
}

function origin(provenance) {
  const [from, way] = provenance.forked_from ? [provenance.forked_from, "forked from"] : [provenance.folded_from, "folded from"];
  if (!from) return "its own beginning";
  return html`${way} <a href=${hrefOf(from.session)}>${nameOf(from.session)}</a>@${from.version}, ${plural(from.tokens, "token")}`;
}

function exactness({ info, provenance }) {
  const told = [];
  if (info.lossy) told.push(`The first ${plural(info.lossy.tokens, "token")} are kept in ${info.lossy.bits} bits: close to what was computed, and so is what follows.`);
  if (provenance.recomputed) {
    const part = provenance.recomputed;
    const same = part.same_logits ? "with the same result" : "with a result of other bits";
    told.push(`${plural(part.tokens, "token")} from ${count(part.start)} on were computed again${part.damaged ? " after damage" : ""}, ${same}.`);
  }
  if (provenance.elsewhere_tokens) told.push(`The first ${plural(provenance.elsewhere_tokens, "token")} were computed by another backend.`);
  if (provenance.differs.length) told.push(`It was computed with another ${provenance.differs.map((part) => plain(part.field)).join(", ")} than is here.`);
  return told.length ? told.join(" ") : "Exact: it is what the model computed, to the bit. Each wake computes one token again and compares.";
}

const REQUESTS = [
  { name: "When", size: "12ch", of: (row) => html`<${Time} ns=${row.at_ns} />` },
  { name: "Request", size: "11ch", from: 700, of: (row) => plain(row.cost?.verb || row.verb) },
  { name: "Client", size: "minmax(8ch, 0.4fr)", from: 1100, of: (row) => plain(row.cost?.client || "socket") },
  { name: "Cause", size: "minmax(10ch, 1fr)", of: (row) => plain(row.cost?.cause ?? row.outcome) },
  { name: "Read", right: true, size: "7ch", of: (row) => count(row.cost?.read_tokens) },
  { name: "Read again", right: true, size: "11ch", from: 700, of: (row) => count(row.cost?.read_again_tokens) },
  { name: "Taken over", right: true, size: "11ch", from: 900, of: (row) => count(row.cost?.taken_over_tokens) },
  { name: "Written", right: true, size: "8ch", from: 480, of: (row) => count(row.cost?.written_tokens) },
  { name: "Time", right: true, size: "9ch", from: 480, of: (row) => (row.cost ? seconds(row.cost.seconds) : "–") },
];

function Requests({ name, why }) {
  const rows = [...(why.value?.requests ?? [])].reverse();
  return html`<${Panel} wide title="Last requests" asked=${why} command=${`torpor why ${typed(name)}`} note=${() => count(rows.length)} empty=${() => rows.length === 0 && "No request for it is known."}>
    <${Table} label="Requests" columns=${REQUESTS} rows=${rows} keyOf=${(row) => row.at_ns} most=${8} />
    ${rows.filter((row) => row.outcome === "diverged").map((row) => html`<${Miss} row=${row} />`)}
  <//>`;
}

function Miss({ row }) {
  return html`<details class="miss">
    <summary><b>${plain(row.cause)}</b> at token ${count(row.position)}, <${Time} ns=${row.at_ns} /></summary>
    ${row.remedy && html`<p>${plain(row.remedy)}</p>`}
    <div class="sides">
      <div><span class="small">was there</span><pre dir="auto" tabindex="0">${plainText(row.expected_text ?? "–")}</pre></div>
      <div><span class="small">was asked</span><pre dir="auto" tabindex="0">${plainText(row.found_text ?? "–")}</pre></div>
    </div>
  </details>`;
}

export const versionMarks = (version) => [
  ...version.tags.map((tag) => [plain(tag), "label", `tag ${plain(tag)}`]),
  ...(version.pinned ? [["pinned", "plain", "It is never pruned."]] : []),
  ...(version.stripped ? [["stripped", "warn", "The next use reads again what went."]] : []),
  ...(version.lossy ? [[`≈ ${version.lossy.bits} bits`, "warn"]] : []),
];

function Versions({ name, asked, chosen, onChoose }) {
  const columns = [
    {
      name: "Version",
      size: "12ch",
      of: (row) => html`<button class=${row.version === chosen ? "pick picked" : "pick"} tabindex="-1" aria-pressed=${row.version === chosen ? "true" : "false"} onClick=${() => onChoose(row.version)}>@${row.version}</button>`,
    },
    { name: "Made", size: "14ch", of: (row) => html`<${Time} ns=${row.created_ns} />` },
    { name: "Tokens", size: "9ch", right: true, of: (row) => count(row.token_count) },
    { name: "Logical", size: "10ch", right: true, from: 700, of: (row) => bytes(row.logical_bytes) },
    { name: "Written", size: "10ch", right: true, from: 480, of: (row) => bytes(row.bundle_bytes) },
    { name: "Bundle", size: "14ch", from: 900, of: (row) => html`<span class="mono" title=${row.bundle_id}>${shortId(row.bundle_id)}</span>` },
    { name: "Marks", size: "minmax(10ch, 1fr)", from: 600, of: (row) => html`<${Marks} marks=${versionMarks(row)} />` },
  ];
  const rows = [...asked.value.versions].reverse();
  return html`<${Panel} wide title="Versions" asked=${{ value: asked.value.versions }} command=${`torpor show ${typed(name)}`} note=${count(rows.length)} empty=${rows.length === 0 && "It has no version yet."}>
    <${Table} label="Versions" columns=${columns} rows=${rows} keyOf=${(row) => row.version} most=${10} onOpen=${(row) => onChoose(row.version)} />
  <//>`;
}
