// Which sessions share how much: a matrix over their blocks, and who holds the blocks of a pair.

import { html, useEffect, useMemo, useState } from "./preact.js";
import { ask, known, useAsked } from "./asking.js";
import { Matrix, Names, Panel, Table } from "./parts.js";
import { bare, bytes, count, hrefOf, nameOf, percent, plural, routeOf, shortId, sum, typed } from "./words.js";

const MOST = 20; // sessions in the matrix: those with the most to share

const blocksOf = ({ session }) => routeOf(session, "/blocks");

// The blocks of the chosen sessions, asked one after the other: { sessions: { name: blocks }, problems }.
function useBlocks(infos) {
  const [found, setFound] = useState({});
  const key = infos.map(blocksOf).join("\n");
  useEffect(() => {
    const leaving = new AbortController();
    (async () => {
      const told = { of: key, sessions: {}, problems: [] };
      for (const info of infos) {
        try {
          told.sessions[info.session] = (await ask(blocksOf(info), { signal: leaving.signal })).blocks;
        } catch (error) {
          if (error.name === "AbortError") return;
          told.problems.push({ message: `${bare(info.session)}: ${error.message}` });
        }
      }
      setFound(told);
    })();
    return () => leaving.abort();
  }, [key]);
  return found.of === key ? found : undefined;
}

const sumOf = (blocks) => sum(blocks, (block) => block.logical_bytes);

export function Sharing() {
  const sessions = useAsked("/v1/sessions");
  const stored = useMemo(() => (sessions.value?.sessions ?? []).filter((info) => info.version !== null), [sessions.value]);
  const infos = useMemo(() => stored.filter((info) => known(blocksOf(info))).sort((a, b) => b.token_count - a.token_count).slice(0, MOST).sort((a, b) => (a.session < b.session ? -1 : 1)), [stored]);
  const found = useBlocks(infos);
  const [pair, setPair] = useState([0, 1]);
  const left = stored.length - infos.length;
  const read = Object.keys(found?.sessions ?? {});
  const ids = useMemo(() => read.map((name) => new Set(found.sessions[name].map((block) => block.block_id))), [found]);
  const common = (row, column) => found.sessions[read[row]].filter((block) => ids[column].has(block.block_id));
  const sums = useMemo(() => read.map((_, row) => read.map((_, column) => sumOf(common(row, column)))), [found]);
  const cell = (row, column) => {
    const part = sums[row][column] / Math.max(1, sums[row][row]);
    return { part, text: part ? Math.round(100 * part) : "", says: `${nameOf(read[row])} and ${nameOf(read[column])}: ${bytes(sums[row][column])}, ${percent(part, 1)}` };
  };
  const at = pair.map((one) => Math.min(one, read.length - 1));
  const [one, other] = at.map((at) => read[at]);
  const shared = found && read.length > 1 ? common(...at) : [];
  const columns = [
    { name: "Tokens", size: "16ch", of: (block) => `${count(block.start)} to ${count(block.start + block.tokens)}` },
    { name: "Size", right: true, of: (block) => bytes(block.logical_bytes) },
    { name: "Block", size: "14ch", from: 700, of: (block) => html`<span class="mono">${shortId(block.block_id)}</span>` },
    { name: "Held by", size: "1fr", of: (block) => html`<${Names} names=${read.filter((_, at) => ids[at].has(block.block_id))} />` },
  ];
  return html`<h1>Sharing</h1>
    <${Panel} wide title="Raw bytes in common" asked=${{ ...sessions, value: sessions.value && found }} command=${one && `torpor diff ${typed(one)} ${typed(other)} --stat`} more=${shared.slice(0, 1).map((block) => [{ value: shared }, `torpor who ${shortId(block.block_id)}`])}
      note=${() => `${plural(infos.length, "session")}${left ? `, ${count(left)} smaller ones left out` : ""}`} empty=${() => read.length < 2 && "It takes two sessions with a version."}>
      ${() => html`<${Matrix} label="Bytes that two sessions share" rows=${read.map(nameOf)} columns=${read.map((_, at) => at + 1)} link=${(row) => hrefOf(read[row])} cell=${cell} at=${at} onAt=${setPair} />
        <p class="small">A cell says how many percent of the row's session are also in the column's, as both are now; the overview counts earlier versions, too. Choose one: its blocks are below.</p>
        <p>${cell(...at).says}</p>
        <${Table} label="Holders" columns=${columns} rows=${shared} keyOf=${(block) => block.block_id} />`}
    <//>`;
}
