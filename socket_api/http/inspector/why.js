// Why tokens were read again, and what requests cost.

import { html, useState } from "./preact.js";
import { isFile, useAsked } from "./asking.js";
import { Legend, Panel, Table } from "./parts.js";
import { clock, count, hrefOf, nameOf, percent, plain, plural, seconds, sum } from "./words.js";

const OFTEN_S = 10;
const SINCE = ["1h", "24h", "7d", ""];
const BY = ["cause", "session", "client", "hour"];
const TALL = 120;
const HOUR_S = 3600;
const MOST_HOURS = 168;

export function Why() {
  const [since, setSince] = useState(isFile ? "" : "24h");
  const [by, setBy] = useState("cause");
  const query = (by) => `/v1/why?${since && `since=${since}&`}by=${by}`;
  const costs = useAsked(query(by), OFTEN_S);
  const hours = useAsked(query("hour"), OFTEN_S);
  const command = `torpor why --all${since && ` --since ${since}`}`;
  const none = ({ rows }) => rows.length === 0 && "No request is known of this time.";
  return html`<h1>Why it was read again</h1>
    <div class="tools wide">
      ${!isFile && html`<label>since <select value=${since} onChange=${(event) => setSince(event.currentTarget.value)}>${SINCE.map((value) => html`<option value=${value}>${value || "all"}</option>`)}</select></label>`}
      <label>by <select value=${by} onChange=${(event) => setBy(event.currentTarget.value)}>${BY.map((value) => html`<option value=${value}>${value}</option>`)}</select></label>
    </div>
    <${Panel} wide title="Tokens by hour" asked=${hours} command=${`${command} --by hour`} empty=${none}>${({ rows }) => html`<${Hours} rows=${rows} />`}<//>
    <${Panel} wide title="What requests cost" asked=${costs} command=${`${command} --by ${by}`} note=${({ total }) => plural(total.requests, "request")} empty=${none}>
      ${(told) => html`<${Table} label="Costs" columns=${columnsFor(told.by)} rows=${told.rows} keyOf=${(row) => row.key} foot=${[{ ...told.total, name: "in all" }]}
          onOpen=${(row) => told.by === "session" && row.key && (location.hash = hrefOf(row.key))} />
        ${told.by === "cause" && html`<p class="small">A session's view has its last requests, with both texts and what helps.</p>`}
        ${told.left_out > 0 && html`<p class="small">${plural(told.left_out, "further row")} in the sum alone.</p>`}`}
    <//>`;
}

function keyOf(by, key) {
  if (by === "cause") return plain(key);
  if (by === "hour") return clock(key * 1e9);
  if (by === "client") return plain(key || "the socket");
  return key ? html`<a href=${hrefOf(key)} tabindex="-1">${nameOf(key)}</a>` : "deleted since";
}

function number(name, field, from, show = count) {
  const of = (row) => show(row[field]);
  return { name, right: true, size: `${Math.max(9, name.length + 2)}ch`, from, of, sum: of, sort: (row) => row[field] };
}

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

// A bar for each hour: what was new below, what was read again on top.
function Hours({ rows }) {
  const told = new Map(rows.map((row) => [Number(row.key) / HOUR_S, row]));
  const last = Math.max(...told.keys());
  const first = Math.max(Math.min(...told.keys()), last - MOST_HOURS + 1);
  const shown = Math.max(12, last - first + 1);
  const hours = Array.from({ length: shown }, (_, index) => last - shown + 1 + index);
  const most = Math.max(1, ...rows.map((row) => row.read_tokens));
  const again = sum(rows, (row) => row.read_again_tokens);
  const read = sum(rows, (row) => row.read_tokens);
  const at = (hour) => clock(hour * HOUR_S * 1e9);
  return html`<svg class="hours" viewBox=${`0 0 ${hours.length} ${TALL}`} preserveAspectRatio="none" role="img"
      aria-label=${`${count(read)} tokens read, of these ${count(again)} again, in ${hours.length} hours`}>
      ${hours.map((hour, index) => {
        const row = told.get(hour);
        if (!row) return null;
        const [all, second] = [(row.read_tokens / most) * (TALL - 4), (Math.min(row.read_again_tokens, row.read_tokens) / most) * (TALL - 4)];
        return html`<g><title>${`${at(hour)}: ${count(row.read_tokens)} read, ${count(row.read_again_tokens)} again`}</title>
          <rect class="k-shared" x=${index + 0.1} y=${TALL - all} width="0.8" height=${all - second} /><rect class="k-damaged" x=${index + 0.1} y=${TALL - second} width="0.8" height=${second} /></g>`;
      })}
    </svg>
    <div class="scale" aria-hidden="true"><span>${at(hours[0])}</span><span>highest: ${count(most)} tokens</span><span>${at(last)}</span></div>
    <${Legend} parts=${[["k-shared", "new", count(read - again)], ["k-damaged", "read again", `${count(again)}, ${percent(again, read)}`]]} />`;
}
