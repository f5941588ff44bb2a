// Why tokens were read again, and what all requests cost: by cause, session, client or hour.

import { html, useState } from "./preact.js";
import { useAsked } from "./asking.js";
import { Empty, Panel, Table } from "./parts.js";
import { causeOf, count, hrefOf, nameOf, percent, plain, seconds } from "./words.js";

const OFTEN_S = 10;
const SINCE = [["1h", "the last hour"], ["24h", "24 hours"], ["7d", "7 days"], ["", "all that is known"]];
const BY = ["cause", "session", "client", "hour"];
const TALL = 120;
const HOUR_S = 3600;
const MOST_HOURS = 168;

export function Why() {
  const [since, setSince] = useState("24h");
  const [by, setBy] = useState("cause");
  const query = `${since ? `since=${since}&` : ""}by=`;
  const costs = useAsked(`/v1/why?${query}${by}`, OFTEN_S);
  const hours = useAsked(`/v1/why?${query}hour`, OFTEN_S);
  const command = `torpor why --all${since ? ` --since ${since}` : ""}`;
  return html`<h1>Why it was read again</h1>
    <div class="tools wide">
      <label>of <select value=${since} onChange=${(event) => setSince(event.currentTarget.value)}>${SINCE.map(([value, name]) => html`<option value=${value}>${name}</option>`)}</select></label>
      <label>by <select value=${by} onChange=${(event) => setBy(event.currentTarget.value)}>${BY.map((value) => html`<option value=${value}>${value}</option>`)}</select></label>
    </div>
    <${Panel} wide title="Tokens by hour" asked=${hours} command=${`${command} --by hour`}>
      ${hours.value && (hours.value.rows.length === 0 ? html`<${Empty}>No request is known of this time.<//>` : html`<${Hours} rows=${hours.value.rows} />`)}
    <//>
    <${Panel} wide title="What requests cost" asked=${costs} command=${`${command} --by ${by}`} note=${costs.value && `${count(costs.value.total.requests)} requests`}>
      ${costs.value && costs.value.rows.length === 0
        ? html`<${Empty}>No request is known of this time.<//>`
        : costs.value && html`<${Table} label="Costs" columns=${columnsFor(costs.value.by)} rows=${costs.value.rows} keyOf=${(row) => row.key} first=${{ name: "" }}
            foot=${[footOf(costs.value.total)]} most=${16} onOpen=${(row) => costs.value.by === "session" && row.key && (location.hash = hrefOf(row.key))} />`}
      ${costs.value?.by === "cause" && html`<p class="small">A session's own view has each of its last requests, with both texts and what helps.</p>`}
      ${costs.value?.left_out > 0 && html`<p class="small">${count(costs.value.left_out)} further rows are in the sum alone.</p>`}
      ${costs.value?.problem && html`<p class="failure">${costs.value.problem}</p>`}
    <//>`;
}

function keyOf(by, key) {
  if (by === "cause") return causeOf(key);
  if (by === "hour") return new Date(Number(key) * 1000).toLocaleString("en-CA", { hour12: false, dateStyle: "short", timeStyle: "short" });
  if (by === "client") return plain(key || "the socket");
  return key ? html`<a href=${hrefOf(key)} tabindex="-1">${nameOf(key)}</a>` : "deleted since";
}

const number = (name, field, from, show = count) => ({ name, right: true, size: `${Math.max(9, name.length + 2)}ch`, from, of: (row) => show(row[field]), sort: (row) => row[field] });

const columnsFor = (by) => [
  { name: by[0].toUpperCase() + by.slice(1), size: "minmax(14ch, 1.4fr)", of: (row) => keyOf(by, row.key) },
  number("Requests", "requests", 520),
  number("Failed", "failed", 1200),
  number("Read again", "read_again_tokens", 0),
  number("Read", "read_tokens", 700),
  number("Reused", "reused_tokens", 860),
  number("Written", "written_tokens", 1000),
  number("Time", "seconds", 380, seconds),
  number("Waited", "waited_seconds", 1300, seconds),
  number("Woke", "wake_seconds", 1400, seconds),
  number("Reading", "read_seconds", 1500, seconds),
];

const footOf = (total) => ({
  ...Object.fromEntries(["Cause", "Session", "Client", "Hour"].map((name) => [name, "in all"])),
  Requests: count(total.requests),
  Failed: count(total.failed),
  "Read again": count(total.read_again_tokens),
  Read: count(total.read_tokens),
  "Reused": count(total.reused_tokens),
  Written: count(total.written_tokens),
  Time: seconds(total.seconds),
  Waited: seconds(total.waited_seconds),
  Woke: seconds(total.wake_seconds),
  Reading: seconds(total.read_seconds),
});

// A bar for each hour: what was read for the first time below, what was read again on top.
function Hours({ rows }) {
  const told = new Map(rows.map((row) => [Number(row.key) / HOUR_S, row]));
  const last = Math.max(...told.keys());
  const first = Math.max(Math.min(...told.keys()), last - MOST_HOURS + 1);
  const hours = Array.from({ length: Math.max(12, last - first + 1) }, (_, at) => last - Math.max(12, last - first + 1) + 1 + at);
  const most = Math.max(1, ...rows.map((row) => row.read_tokens));
  const again = rows.reduce((sum, row) => sum + row.read_again_tokens, 0);
  const read = rows.reduce((sum, row) => sum + row.read_tokens, 0);
  const clock = (hour) => new Date(hour * HOUR_S * 1000).toLocaleString("en-CA", { hour12: false, month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
  return html`<svg class="hours" viewBox=${`0 0 ${hours.length} ${TALL}`} preserveAspectRatio="none" role="img"
      aria-label=${`${count(read)} tokens read, of these ${count(again)} again, in ${hours.length} hours`}>
      ${hours.map((hour, at) => {
        const row = told.get(hour);
        if (!row) return null;
        const [all, second] = [(row.read_tokens / most) * (TALL - 4), (Math.min(row.read_again_tokens, row.read_tokens) / most) * (TALL - 4)];
        return html`<g><title>${`${clock(hour)}: ${count(row.read_tokens)} read, ${count(row.read_again_tokens)} again`}</title>
          <rect class="k-shared" x=${at + 0.1} y=${TALL - all} width="0.8" height=${all - second} /><rect class="k-damaged" x=${at + 0.1} y=${TALL - second} width="0.8" height=${second} /></g>`;
      })}
    </svg>
    <div class="scale" aria-hidden="true"><span>${clock(hours[0])}</span><span>highest: ${count(most)} tokens</span><span>${clock(last)}</span></div>
    <dl class="parts"><div><dt><i class="k-shared"></i>read for the first time</dt><dd>${count(read - again)}</dd></div>
      <div><dt><i class="k-damaged"></i>read again</dt><dd>${count(again)}, ${percent(again, read)}</dd></div></dl>`;
}
