// The ribbon of a version: its ledger from the first token to the last, a stretch for each block, by place or by role.

import { html, useEffect, useMemo, useState } from "./preact.js";
import { ask } from "./asking.js";
import { Empty, Facts, Panel, Time } from "./parts.js";
import { bytes, count, plainText, plural, roleOf, routeOf, shortId, typed } from "./words.js";

// By what a reader has to know first: where several hold, the first one is drawn. As in `torpor blocks`.
const PLACES = {
  damaged: "damaged or missing",
  stripped: "stripped",
  lossy: "lossy",
  shared: "shared",
  alone: "alone",
  ledger: "tokens alone",
  journal: "in the journal",
  memory: "in memory alone",
};
const KNOWN_ROLES = ["system", "tools", "user", "thinking", "assistant", "tool"];
const TALL = 56;

export function placeOf(block) {
  if (block.condition === "damaged" || block.condition === "missing") return "damaged";
  if (block.condition === "stripped") return "stripped";
  if (block.lossy_bits !== null) return "lossy";
  return (block.sessions_needing ?? 1) > 1 ? "shared" : "alone";
}

// { start, end, place, block }: the ledger in order. What has no block comes last.
export function stretchesOf(found) {
  const stretches = found.blocks
    .filter((block) => block.tokens > 0)
    .map((block) => ({ start: block.start, end: block.start + block.tokens, place: placeOf(block), block }));
  let at = found.token_count - found.unread_tokens;
  for (const [tokens, place] of [
    [found.unread_tokens, "ledger"],
    [found.journal_tokens, "journal"],
    [(found.memory_tokens ?? 0) - found.token_count - found.journal_tokens, "memory"],
  ]) {
    if (tokens > 0) stretches.push({ start: at, end: (at += tokens), place, block: null });
  }
  return stretches;
}

// The pieces of a stretch that are drawn: [start, end, class].
function piecesOf(stretch, byRole) {
  const holds = Object.entries(stretch.block?.holds ?? {});
  if (!byRole || holds.length === 0) return [[stretch.start, stretch.end, byRole ? "r-text" : `k-${stretch.place}`]];
  let at = stretch.start;
  return holds.map(([role, tokens]) => [at, (at += tokens), `r-${KNOWN_ROLES.includes(role) ? role : "text"}`]);
}

export function Ribbon({ session, asked, version, onFork }) {
  const found = asked.value;
  const stretches = useMemo(() => (found ? stretchesOf(found) : []), [found]);
  const states = found ? found.blocks.filter((block) => block.tokens === 0) : [];
  const hasRoles = stretches.some((stretch) => Object.keys(stretch.block?.holds ?? {}).length > 0);
  const [byRole, setByRole] = useState(false);
  const [at, setAt] = useState(0);
  const [revealed, setRevealed] = useState(false);
  const chosen = stretches[Math.min(at, stretches.length - 1)];
  const choose = (name, role) => html`<label><input type="radio" name="by" checked=${byRole === role} onChange=${() => setByRole(role)} />${name}</label>`;
  return html`<${Panel} wide title="Blocks" asked=${asked} command=${`torpor blocks ${typed(version)}`}
    note=${found && `${plural(found.blocks.length, "block")}, ${bytes(found.stored_bytes ?? found.logical_bytes)}`}>
    ${found && stretches.length === 0 && html`<${Empty}>This version has no tokens.<//>`}
    ${chosen && html`<div class="tools" role="radiogroup" aria-label="Color the ribbon">
        ${choose("by place", false)}
        ${hasRoles ? choose("by role", true) : html`<span class="small">Roles are known of chats alone.</span>`}
        ${chosen.block && html`<button onClick=${() => onFork({ reference: version, tokens: chosen.end })}>Fork behind this block …</button>`}
        <button onClick=${() => setRevealed(!revealed)} aria-pressed=${revealed ? "true" : "false"}>${revealed ? "Hide text" : "Show text"}</button>
      </div>
      <${Strip} stretches=${stretches} byRole=${byRole && hasRoles} at=${Math.min(at, stretches.length - 1)} onAt=${setAt} />
      <${Legend} stretches=${stretches} byRole=${byRole && hasRoles} />
      ${states.length > 0 && html`<p class="small">Beside them ${plural(states.length, "record")} of the whole state, ${bytes(states.reduce((sum, block) => sum + (block.stored_bytes ?? block.logical_bytes), 0))}.</p>`}
      <div class="chosen">
        <${Chosen} stretch=${chosen} number=${Math.min(at, stretches.length - 1) + 1} of=${stretches.length} />
        ${revealed && html`<${Text} session=${session} version=${version} stretch=${chosen} />`}
      </div>
      ${found.blocks_left_out > 0 && html`<p class="small">${plural(found.blocks_left_out, "further block")} left out.</p>`}
      ${found.problems?.map((problem) => html`<p class="failure">${problem.message}</p>`)}`}
  <//>`;
}

function Strip({ stretches, byRole, at, onAt }) {
  const total = stretches.at(-1).end;
  const chosen = stretches[at];
  const move = (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    onAt(Math.max(0, Math.min(stretches.length - 1, at + steps[event.key])));
  };
  const point = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const token = ((event.clientX - box.left) / box.width) * total;
    const found = stretches.findIndex((stretch) => token < stretch.end);
    if (found >= 0) onAt(found);
  };
  return html`<div class="strip" role="slider" tabindex="0" aria-label="Block of the ribbon" aria-valuemin="1" aria-valuemax=${stretches.length}
    aria-valuenow=${at + 1} aria-valuetext=${`tokens ${chosen.start} to ${chosen.end}, ${PLACES[chosen.place]}`} onKeyDown=${move} onPointerMove=${point} onPointerDown=${point}>
    <svg viewBox=${`0 0 ${total} ${TALL}`} preserveAspectRatio="none" aria-hidden="true">
      ${stretches.map((stretch) => piecesOf(stretch, byRole).map(([start, end, kind]) => html`<rect class=${kind} x=${start} y="6" width=${end - start} height=${TALL - 12} />`))}
      ${stretches.map((stretch) => html`<line x1=${stretch.end} x2=${stretch.end} y1="6" y2=${TALL - 6} />`)}
      <rect class="frame" x=${chosen.start} y="2" width=${chosen.end - chosen.start} height=${TALL - 4} />
    </svg>
    <div class="scale" aria-hidden="true"><span>0</span><span>${count(total)} tokens</span></div>
  </div>`;
}

function Legend({ stretches, byRole }) {
  const sums = new Map();
  for (const stretch of stretches) {
    const parts = byRole ? Object.entries(stretch.block?.holds ?? { text: stretch.end - stretch.start }) : [[stretch.place, stretch.end - stretch.start]];
    for (const [name, tokens] of parts) {
      const sum = sums.get(name) ?? { tokens: 0, bytes: 0 };
      sums.set(name, { tokens: sum.tokens + tokens, bytes: sum.bytes + (byRole ? 0 : (stretch.block?.stored_bytes ?? 0)) });
    }
  }
  const order = byRole ? [...sums.keys()] : Object.keys(PLACES).filter((place) => sums.has(place));
  const kind = (name) => (byRole ? `r-${KNOWN_ROLES.includes(name) ? name : "text"}` : `k-${name}`);
  return html`<dl class="parts">${order.map((name) => html`<div>
    <dt><i class=${kind(name)}></i>${byRole ? roleOf(name) : PLACES[name]}</dt>
    <dd>${plural(sums.get(name).tokens, "token")}${sums.get(name).bytes ? `, ${bytes(sums.get(name).bytes)}` : ""}</dd>
  </div>`)}</dl>`;
}

function Chosen({ stretch, number, of }) {
  const block = stretch.block;
  const span = `${count(stretch.start)} to ${count(stretch.end)}`;
  if (!block) return html`<${Facts} facts=${[["part", `${number} of ${of}`], ["tokens", span], ["kept", PLACES[stretch.place]]]} />`;
  const kept = { damaged: block.condition, stripped: "stripped", lossy: `in ${block.lossy_bits} bits` }[stretch.place] ?? "exact";
  const others = block.sessions_needing - 1;
  return html`<${Facts} facts=${[
    ["block", `${number} of ${of}`],
    ["tokens", span],
    ["holds", Object.entries(block.holds).map(([role, tokens]) => `${roleOf(role)} ${count(tokens)}`).join(", ")],
    ["raw", bytes(block.logical_bytes)],
    ["on disk", block.stored_bytes === undefined ? null : `${bytes(block.stored_bytes)}${block.codec === "planes" ? ", compressed" : ""}`],
    ["kept", kept],
    ["shared with", block.sessions_needing === undefined ? null : others ? `${plural(others, "other session")}, ${plural(block.versions_needing, "version")} in all` : "no other session"],
    ["in memory", block.resident === null ? null : block.resident ? "yes" : "no"],
    ["read back", block.read_ns ? html`<${Time} ns=${block.read_ns} />` : null],
    ["who needs it", html`<code>torpor who ${shortId(block.block_id)}</code>`],
  ]} />`;
}

// The text of a stretch. It is asked for once it is to be seen, and not before.
function Text({ version, stretch }) {
  const [told, setTold] = useState({});
  useEffect(() => {
    const leaving = new AbortController();
    const path = routeOf(stretch.block ? version : version.split("@")[0], `/contents?start=${stretch.start}&end=${stretch.end}`);
    const later = setTimeout(async () => {
      try {
        setTold({ of: stretch, contents: await ask(path, { signal: leaving.signal }) });
      } catch (error) {
        if (error.name !== "AbortError") setTold({ of: stretch, error });
      }
    }, 120);
    return () => {
      clearTimeout(later);
      leaving.abort();
    };
  }, [version, stretch.start, stretch.end]);
  if (told.error) return html`<p class="failure" role="status">${told.error.message}</p>`;
  const contents = told.contents;
  if (!contents) return html`<p class="small">reading …</p>`;
  if (contents.no_text) return html`<p class="empty">${contents.no_text}</p>`;
  return html`<div class=${told.of === stretch ? "texts" : "texts old"}>
    ${contents.passages.map((passage) => html`<div><span class="small"><i class=${`r-${KNOWN_ROLES.includes(passage.role) ? passage.role : "text"}`}></i>${roleOf(passage.role)}, from token ${count(passage.start)}</span>
      <pre dir="auto">${plainText(passage.text ?? "")}</pre></div>`)}
  </div>`;
}
