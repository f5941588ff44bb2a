// The overview: memory and disk against their budgets, what waits, and every session with its sizes in four coins.

import { html, useMemo, useState } from "./preact.js";
import { isOwner, useAsked } from "./asking.js";
import { Bar, Empty, Facts, Marks, Panel, Table, Time } from "./parts.js";
import { bytes, count, hrefOf, nameOf, percent, plain, plural } from "./words.js";

const OFTEN_S = 5;
const SELDOM_S = 20;
const RARELY_S = 60;
const MANY = 1000; // sessions: to list them costs the daemon seconds, so it is asked rarely

export function Overview() {
  const [many, setMany] = useState(false);
  const sessions = useAsked("/v1/sessions", many ? RARELY_S : OFTEN_S);
  const models = useAsked("/v1/models", SELDOM_S);
  const status = useAsked(isOwner() ? "/v1/status" : null, OFTEN_S);
  const usage = useAsked(isOwner() ? "/v1/usage" : null, SELDOM_S);
  if (sessions.value && sessions.value.sessions.length > MANY !== many) setMany(!many);
  return html`<h1 class="hidden">Overview</h1>
    ${isOwner() && html`<div class="beside"><${Memory} status=${status} /><${Disk} usage=${usage} status=${status} /><${Queue} status=${status} /></div>`}
    <${Sessions} sessions=${sessions} models=${models} usage=${usage} />`;
}

function Memory({ status }) {
  const memory = status.value?.memory;
  const used = memory ? memory.weights_bytes + memory.sessions_bytes + memory.branches_bytes + memory.reserved_bytes : 0;
  return html`<${Panel} title="Memory" asked=${status} command="torpor doctor" note=${memory && `${bytes(used)} of ${bytes(memory.budget_bytes)}`}>
    ${memory && html`<${Bar} label="Memory" parts=${[
      ["models", memory.weights_bytes, "ledger"],
      ["sessions", memory.sessions_bytes, "memory"],
      ["branches", memory.branches_bytes, "shared"],
      ["kept for requests", memory.reserved_bytes, "journal"],
      ["free of the budget", Math.max(0, memory.budget_bytes - used), "rest"],
    ]} />`}
  <//>`;
}

function Disk({ usage, status }) {
  const found = usage.value;
  const own = found ? found.sessions.reduce((sum, one) => sum + one.alone_bytes, 0) : 0;
  const budget = status.value?.disk?.store_budget_bytes;
  const of = budget ? ` of ${bytes(budget)}` : "";
  return html`<${Panel} title="Disk" asked=${usage} command="torpor du" note=${found && `${bytes(found.file_bytes)}${of}`}>
    ${found && html`<${Bar} label="Disk" parts=${[
      ["alone: one session's", own, "alone"],
      ...(found.alone_bytes > own ? [["alone, other namespaces", found.alone_bytes - own, "ledger"]] : []),
      ["shared, once", found.shared_bytes, "shared"],
      ["needed by nothing", found.unneeded_bytes, "lossy"],
      ...(found.unreadable_bytes ? [["cannot be read", found.unreadable_bytes, "damaged"]] : []),
      ["index, journal, rest", found.rest_bytes - found.unneeded_bytes - found.unreadable_bytes, "rest"],
    ]} />
    <p class="small">Counted <${Time} ns=${found.counted_ns} />.${found.problems.length ? ` ${plural(found.problems.length, "file")} cannot be read: torpor verify.` : ""}</p>`}
  <//>`;
}

function Queue({ status }) {
  const told = status.value;
  return html`<${Panel} title="What waits" asked=${status} command="torpor top" note=${told && `${plural(told.sessions_awake, "session")} awake, ${count(told.sessions_asleep)} asleep`}>
    ${told && html`<${Facts} facts=${[
      ["in the queue", `${count(told.queue.waiting)} of ${count(told.queue.limit)}`],
      ["waiting for memory", count(told.memory.waiting)],
      ["slept to make room", count(told.memory.slept_by_pressure)],
      ["slept for disuse", count(told.memory.slept_by_idling)],
      ["tokens taken over", count(told.cached_tokens)],
    ]} />`}
  <//>`;
}

// --- sessions

function marksOf({ info, usage }) {
  const marks = [];
  if (info.state === "awake" && info.version !== null && info.dirty) marks.push(["changed", "plain", "It has changed since its last version."]);
  if (info.state === "awake" && info.version === null) marks.push(["no version", "warn", "It has never slept: torpor save makes a version."]);
  if (usage?.versions && usage.versions === usage.stripped_versions) marks.push(["stripped", "warn", "The next use reads tokens again that nothing else has kept."]);
  else if (info.unread_tokens) marks.push(["ledger", "warn", `The next use reads ${plural(info.unread_tokens, "token")} again.`]);
  if (info.lossy) marks.push([`≈ ${info.lossy.bits} bits`, "warn", `${plural(info.lossy.tokens, "token")} were kept in ${info.lossy.bits} bits.`]);
  if (info.look) marks.push([`look at @${info.look.version}`, "plain", "It was woken at an earlier place, to look at it."]);
  if (info.durability === "none") marks.push(["not durable", "warn", "A crash loses what it did since its last sleep."]);
  if (info.branches) marks.push([plural(info.branches, "branch").replace("branchs", "branches"), "plain"]);
  for (const label of info.labels) marks.push([plain(label), "label", `label ${plain(label)}`]);
  return marks;
}

export const State = ({ state }) => html`<span class=${`state s-${state}`}>${state}</span>`;

function Context({ tokens, most }) {
  const part = most ? Math.min(1, tokens / most) : 0;
  const told = most ? `${count(tokens)} of ${count(most)} tokens, ${percent(tokens, most)}` : plural(tokens, "token");
  return html`<span class="context" title=${told}>
    <span class="meter" aria-hidden="true"><i class=${part > 0.9 ? "full" : ""} style=${{ width: `${100 * part}%` }}></i></span>${count(tokens)}
  </span>`;
}

const coin = (name) => (row) => (row.usage ? bytes(row.usage[`${name}_bytes`]) : "–");
const coinValue = (name) => (row) => row.usage?.[`${name}_bytes`] ?? -1;
const COINS = [
  { name: "Logical", from: 1500, title: "The raw state of all versions, each counted whole." },
  { name: "Stored", title: "What of the disk it needs: shared and alone." },
  { name: "Shared", from: 1200, title: "What others need too; it stays when this session goes." },
  { name: "Alone", title: "Freed if it goes." },
].map((column) => ({ ...column, right: true, size: "9ch", of: coin(column.name.toLowerCase()), sort: coinValue(column.name.toLowerCase()) }));

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
  },
  { name: "Memory", size: "10ch", right: true, from: 860, sort: (row) => row.info.resident_bytes, of: (row) => (row.info.resident_bytes ? bytes(row.info.resident_bytes) : "–") },
  ...(owner ? COINS : []),
  { name: "Last used", size: "13ch", from: owner ? 480 : 0, right: true, sort: (row) => row.used ?? 0, of: (row) => html`<${Time} ns=${row.used} />` },
  { name: "Marks", size: "minmax(12ch, 1fr)", from: 1024, of: (row) => html`<${Marks} marks=${marksOf(row)} />` },
];

function footOf(usage, rows) {
  const sum = (of) => rows.reduce((total, row) => total + of(row), 0);
  const foot = [{ Session: "in all", Context: count(sum((row) => row.info.token_count)), Memory: bytes(sum((row) => row.info.resident_bytes)) }];
  if (!usage) return foot;
  const of = (name) => bytes(usage[`${name}_bytes`]);
  Object.assign(foot[0], { Session: "all, shared once", Logical: of("logical"), Stored: of("stored"), Shared: of("shared"), Alone: of("alone") });
  return [...foot, { Session: "the rest", Stored: of("rest") }, { Session: "on disk", Stored: of("file") }];
}

function Sessions({ sessions, models, usage }) {
  const [filter, setFilter] = useState("");
  const all = useMemo(() => rowsOf(sessions.value, models.value, usage.value), [sessions.value, models.value, usage.value]);
  const rows = filter ? all.filter((row) => row.text.includes(filter.toLowerCase())) : all;
  const columns = useMemo(() => columnsFor(isOwner()), []);
  return html`<${Panel} wide title="Sessions" asked=${sessions} command="torpor ls" note=${sessions.value && (filter ? `${count(rows.length)} of ${count(all.length)}` : count(all.length))}>
    ${all.length === 0
      ? html`<${Empty}>There is no session yet. <code>torpor chat notes</code> begins one; it appears here.<//>`
      : html`<input type="search" placeholder="Filter by name, label, model or state" aria-label="Filter sessions" value=${filter} onInput=${(event) => setFilter(event.currentTarget.value)} />
          ${rows.length === 0
            ? html`<${Empty}>No session fits that filter.<//>`
            : html`<${Table} label="Sessions" columns=${columns} rows=${rows} keyOf=${(row) => row.info.session} onOpen=${(row) => (location.hash = hrefOf(row.info.session))}
                foot=${filter ? footOf(null, rows) : footOf(usage.value, rows)} first=${{ name: isOwner() ? "Alone" : "Last used", down: true }} />`}`}
    ${usage.error && html`<p class="failure">The sizes on the disk cannot be told: ${usage.error.message}</p>`}
  <//>`;
}

function rowsOf(sessions, models, usage) {
  const most = new Map((models?.data ?? []).map((model) => [model.id, model.context_length]));
  const used = new Map((usage?.sessions ?? []).map((one) => [one.session, one]));
  return (sessions?.sessions ?? []).map((info) => ({
    info,
    most: most.get(info.model),
    usage: used.get(info.session),
    used: info.used_ns ?? info.slept_ns,
    text: [info.session, info.state, info.model, ...info.labels].join(" ").toLowerCase(),
  }));
}
