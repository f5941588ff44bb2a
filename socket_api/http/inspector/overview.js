// Memory and disk against their budgets, and every session.

import { html, useMemo, useState } from "./preact.js";
import { isOwner, known, useAsked } from "./asking.js";
import { Bar, Facts, Marks, Names, Panel, Table, Time } from "./parts.js";
import { bytes, count, hrefOf, nameOf, percent, plain, plural, sum, wordOf } from "./words.js";

const OFTEN_S = 5;
const SELDOM_S = 20;
const RARELY_S = 60;
const MOST_PARTS = 4; // of what is shared

export function Overview() {
  const sessions = useAsked("/v1/sessions", OFTEN_S);
  const models = useAsked(known("/v1/models"), SELDOM_S);
  const status = useAsked(isOwner() ? known("/v1/status") : null, OFTEN_S);
  const usage = useAsked(isOwner() && sessions.value ? "/v1/usage" : null, SELDOM_S); // the count would hold up the list
  const why = useAsked("/v1/why?by=session", RARELY_S);
  return html`<h1 class="hidden">Overview</h1>
    ${isOwner() && html`<div class="beside">
      ${status.path && html`<${Memory} status=${status} />`}<${Disk} usage=${usage} status=${status} />
    </div>`}
    <${Sessions} sessions=${sessions} models=${models.value} usage=${usage} why=${why} status=${status.value} />`;
}

const usedOf = (memory) => memory.weights_bytes + memory.sessions_bytes + memory.branches_bytes + memory.reserved_bytes;
const of = (size, budget) => `${bytes(size)}${budget ? ` of ${bytes(budget)}` : ""}`;

function Memory({ status }) {
  return html`<${Panel} title="Memory" asked=${status} command="torpor top" note=${({ memory }) => of(usedOf(memory), memory.budget_bytes)}>
    ${({ memory, queue, sessions_awake, sessions_asleep, cached_tokens }) => html`<${Bar} label="Memory" parts=${[
      ["k-ledger", "models", memory.weights_bytes],
      ["k-memory", "sessions", memory.sessions_bytes],
      ["k-shared", "branches", memory.branches_bytes],
      ["k-journal", "reserved", memory.reserved_bytes],
      ["k-rest", "free", Math.max(0, memory.budget_bytes - usedOf(memory))],
    ]} />
    <${Facts} facts=${[
      ["sessions", `${count(sessions_awake)} awake, ${count(sessions_asleep)} asleep`],
      ["requests waiting", queue.waiting ? `${count(queue.waiting)}, ${count(memory.waiting)} of them for memory` : "none"],
      ["slept to make room", count(memory.slept_by_pressure)],
      ["tokens taken over", count(cached_tokens)],
    ]} />`}
  <//>`;
}

const sharersOf = ({ sessions, session_count }) => html`<${Names} names=${sessions} />${session_count > sessions.length && ` and ${plural(session_count - sessions.length, "other")}`}`;

function Disk({ usage, status }) {
  const { store_budget_bytes, held_bytes } = status.value?.disk ?? {};
  return html`<${Panel} title="Disk" asked=${usage} command="torpor du" note=${(found) => of(found.file_bytes, store_budget_bytes)}>
    ${(found) => html`<${Bar} label="Disk" parts=${[
      ["k-alone", "alone", found.alone_bytes],
      ["k-shared", "shared, once", found.shared_bytes],
      ["k-journal", "the rest", found.rest_bytes],
      ...(store_budget_bytes ? [["k-rest", "free", Math.max(0, store_budget_bytes - held_bytes)]] : []),
    ]} />
    <${Facts} facts=${[
      ...found.shared_by.slice(0, MOST_PARTS).map((part) => [`${bytes(part.size_bytes)} shared by`, sharersOf(part)]),
      ["unneeded", found.unneeded_bytes && html`${bytes(found.unneeded_bytes)}: <code>torpor repack</code> frees it`],
      ["counted", html`<${Time} ns=${found.counted_ns} />`],
    ]} />`}
  <//>`;
}

function marksOf({ info, usage }) {
  const marks = [];
  if (info.state === "awake" && info.version !== null && info.dirty) marks.push(["changed", "plain", "It has changed since its last version."]);
  if (info.state === "awake" && info.version === null) marks.push(["no version", "warn", "It has never slept."]);
  if (usage?.versions && usage.versions === usage.stripped_versions) marks.push(["stripped", "warn", "The next use reads again what went."]);
  else if (info.unread_tokens) marks.push(["ledger", "warn", `The next use reads its last ${plural(info.unread_tokens, "token")}.`]);
  if (info.machine) marks.push([`at ${plain(info.machine)}`, "warn", "It may be older here."]);
  if (info.lossy) marks.push([`≈ ${info.lossy.bits} bits`, "warn", `${plural(info.lossy.tokens, "token")} were kept in ${info.lossy.bits} bits.`]);
  if (info.look) marks.push([`look at @${info.look.version}`, "plain", "It was woken at an earlier place."]);
  if (info.durability === "none") marks.push(["not durable", "warn", "A crash loses it."]);
  if (info.branches) marks.push([`${count(info.branches)} in a tree`, "plain"]);
  for (const label of info.labels) marks.push([plain(label), "label", `label ${plain(label)}`]);
  return marks;
}

export const State = ({ state }) => html`<span class="state"><i class=${state === "awake" ? "k-memory" : "k-ledger"}></i>${state}</span>`;

function Context({ tokens, most }) {
  const part = Math.min(1, tokens / most);
  return html`<span class="context" title=${most && `${count(tokens)} of ${count(most)} tokens, ${percent(tokens, most)}`}>
    ${most && html`<span class="meter" aria-hidden="true"><i class=${part > 0.9 ? "k-lossy" : "k-alone"} style=${{ width: `${100 * part}%` }}></i></span>`}${count(tokens)}
  </span>`;
}

// A column of bytes. of: row -> bytes, also of a row below; undefined where nothing is known.
const sized = (name, from, of, more) => ({ name, from, right: true, size: "9ch", of: (row) => bytes(of(row)), sum: (row) => bytes(of(row), ""), sort: (row) => of(row) ?? -1, ...more });
const coin = (name, from, title) => sized(name, from, (row) => row.usage?.[`${name.toLowerCase()}_bytes`], { title });

const columnsFor = (owner) => [
  {
    name: "Session",
    size: "minmax(9ch, 1.4fr)",
    sort: (row) => row.info.session,
    of: (row) => html`<a href=${hrefOf(row.info.session)} tabindex="-1">${nameOf(row.info.session)}</a>`,
  },
  { name: "State", size: "9ch", from: 480, sort: (row) => row.info.state, of: (row) => html`<${State} state=${row.info.state} />` },
  {
    name: "Context",
    size: "minmax(13ch, 0.6fr)",
    right: true,
    from: 560,
    sort: (row) => row.info.token_count,
    of: (row) => html`<${Context} tokens=${row.info.token_count} most=${row.most} />`,
    sum: (row) => row.tokens && count(row.tokens),
  },
  sized("Memory", 860, (row) => row.memory || undefined),
  ...(owner
    ? [
        coin("Logical", 1500, "The raw state of all versions, each counted whole."),
        coin("Stored", 0, "What it needs of the disk: shared and alone together."),
        coin("Shared", 1200, "What others need too; it stays when this session goes."),
        coin("Alone", 0, "What is freed if it goes."),
      ]
    : []),
  { name: "Last used", size: "13ch", from: owner ? 480 : 0, right: true, sort: (row) => row.used ?? 0, of: (row) => html`<${Time} ns=${row.used} />` },
  {
    name: "Read again",
    title: "When and why it last read tokens that it had read before.",
    size: "minmax(14ch, 1fr)",
    from: 1200,
    sort: (row) => row.again?.last_again_ns ?? 0,
    of: ({ again }) => again?.last_again && html`<span title=${plain(again.last_again)}><${Time} ns=${again.last_again_ns} />: ${plain(again.last_again)}</span>`,
  },
  { name: "Marks", size: "minmax(12ch, 1fr)", from: 1024, of: (row) => html`<${Marks} marks=${marksOf(row)} />` },
];

// The sums of the rows, and for the owner what is missing to the whole disk.
function footOf(rows, usage, status) {
  const tokens = sum(rows, (row) => row.info.token_count);
  const memory = sum(rows, (row) => row.memory);
  if (!usage) return [{ name: "in all", tokens, memory }];
  const missing = (name) => usage[name] - sum(usage.sessions, (one) => one[name]);
  const others = { name: "other namespaces", memory: Math.max(0, (status?.memory.sessions_bytes ?? 0) - memory), usage: { logical_bytes: missing("logical_bytes"), alone_bytes: missing("alone_bytes") } };
  const all = { name: "all, shared once", tokens, memory, usage };
  return [
    ...(others.usage.logical_bytes > 0 ? [others, { ...all, tokens: null, memory: memory + others.memory }] : [all]),
    { name: "the rest", usage: { stored_bytes: usage.rest_bytes } },
    { name: "on disk", usage: { stored_bytes: usage.file_bytes } },
  ];
}

function Sessions({ sessions, models, usage, why, status }) {
  const [filter, setFilter] = useState("");
  const all = useMemo(() => rowsOf(sessions.value, models, usage.value, why.value), [sessions.value, models, usage.value, why.value]);
  const rows = filter ? all.filter((row) => row.text.includes(filter.toLowerCase())) : all;
  return html`<${Panel} wide title="Sessions" asked=${sessions} command="torpor ls" more=${[...(isOwner() ? [[usage, "torpor du"]] : []), [why, "torpor why --all --by session"]]} note=${() => (filter ? `${count(rows.length)} of ${count(all.length)}` : count(all.length))}
    empty=${all.length === 0 && html`There is no session yet. <code>torpor chat notes</code> begins one; it appears here.`}>
    <input type="search" placeholder="Filter by name, label, model or state" aria-label="Filter sessions" value=${filter} onInput=${(event) => setFilter(event.currentTarget.value)} />
    <${Table} label="Sessions" columns=${columnsFor(isOwner())} rows=${rows} keyOf=${(row) => row.info.session} onOpen=${(row) => (location.hash = hrefOf(row.info.session))}
      foot=${footOf(rows, filter ? null : usage.value, status)} first=${{ name: isOwner() ? "Stored" : "Last used", down: true }} />
  <//>`;
}

function rowsOf(sessions, models, usage, why) {
  const most = new Map((models?.data ?? []).map((model) => [model.id, model.context_length]));
  const used = new Map((usage?.sessions ?? []).map((one) => [one.session, one]));
  const again = new Map((why?.rows ?? []).map((one) => [one.key, one]));
  return (sessions?.sessions ?? []).map((info) => ({
    info,
    most: most.get(info.model),
    memory: info.resident_bytes,
    usage: used.get(info.session),
    again: again.get(info.session),
    used: info.used_ns ?? info.slept_ns,
    text: [info.session, info.state, info.model, ...info.labels].join(" ").toLowerCase(),
  }));
}
