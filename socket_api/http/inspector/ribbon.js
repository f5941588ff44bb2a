// The ribbon of a session, or of a version: its ledger from the first token to the last, block by block.

import { html, useEffect, useState } from "./preact.js";
import { isFile, kept, useAsked } from "./asking.js";
import { Facts, Legend, Panel, Time, moved } from "./parts.js";
import { bytes, count, nameOf, plainText, plural, roleOf, routeOf, shortId, sum, typed } from "./words.js";

// As in `torpor blocks`: where several hold, the first one is drawn.
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
const ROLES = ["system", "tools", "user", "thinking", "assistant", "tool"];
const colorOf = (role) => `r-${ROLES.includes(role) ? role : "text"}`;
const TALL = 56;
const SELDOM_S = 20;

function placeOf(block) {
  if (block.condition === "damaged" || block.condition === "missing") return "damaged";
  if (block.condition === "stripped") return "stripped";
  if (block.lossy_bits !== null) return "lossy";
  return (block.sessions_needing ?? 1) > 1 ? "shared" : "alone";
}

// { start, end, place, block }: the ledger in order.
const stretchesOf = ({ blocks, common_tokens, rest }) => [
  ...blocks
    .filter((block) => block.tokens > 0)
    .map((block) => ({ start: block.start, end: Math.min(block.start + block.tokens, common_tokens), place: placeOf(block), block })),
  ...rest.map((stretch) => ({ ...stretch, block: null })),
];

// The pieces of a stretch that are drawn: [tokens, class, name].
function piecesOf({ start, end, place, block }, byRole) {
  if (!byRole) return [[end - start, `k-${place}`, PLACES[place]]];
  const holds = Object.entries(block?.holds ?? {});
  return (holds.length ? holds : [["text", end - start]]).map(([role, tokens]) => [tokens, colorOf(role), roleOf(role)]);
}

// chosen: changes each time that somebody chooses this version.
export function Ribbon({ reference, chosen: asks, onFork }) {
  const asked = useAsked(routeOf(reference, "/blocks"), SELDOM_S);
  const found = asked.value;
  const stretches = found ? stretchesOf(found) : [];
  const states = found ? found.blocks.filter((block) => block.tokens === 0) : [];
  const hasRoles = stretches.some((stretch) => Object.keys(stretch.block?.holds ?? {}).length > 0);
  const [byRole, setByRole] = useState(false);
  const [wanted, setAt] = useState(0);
  const at = Math.min(wanted, stretches.length - 1);
  const [revealed, setRevealed] = useState(false);
  const chosen = stretches[at];
  useEffect(() => asks && document.querySelector(".strip")?.focus(), [asks, !found]);
  const choose = (name, role) => html`<label><input type="radio" name="by" checked=${byRole === role} onChange=${() => setByRole(role)} />${name}</label>`;
  return html`<${Panel} wide title=${`Blocks of ${nameOf(reference)}`} asked=${asked} command=${`torpor blocks ${typed(reference)}`} empty=${({ token_count }) => !chosen && (token_count ? "Its blocks cannot be read." : "It has no tokens.")}
    note=${({ blocks, stored_bytes, logical_bytes }) => `${plural(blocks.length, "block")}, ${bytes(stored_bytes ?? logical_bytes)}`}>
    ${({ version, token_count, common_tokens, blocks_left_out }) => html`<div class="tools" role="radiogroup" aria-label="Color the ribbon">
        ${choose("by place", false)}
        ${hasRoles ? choose("by role", true) : html`<span class="small">Roles are known of chats alone.</span>`}
        ${!isFile && html`<button onClick=${() => onFork({ reference, tokens: chosen.end, most: stretches.at(-1).end })}>Fork from here …</button>`}
        ${(!isFile || kept.with_text) && html`<button onClick=${() => setRevealed(!revealed)} aria-pressed=${revealed ? "true" : "false"}>${revealed ? "Hide text" : "Show text"}</button>`}
      </div>
      <${Strip} stretches=${stretches} byRole=${byRole && hasRoles} at=${at} onAt=${setAt} />
      <${Colors} stretches=${stretches} byRole=${byRole && hasRoles} />
      ${states.length > 0 && html`<p class="small">Beside them ${plural(states.length, "record")} of the whole state, ${bytes(sum(states, (block) => block.stored_bytes ?? block.logical_bytes))}.</p>`}
      ${common_tokens < token_count && html`<p class="small">It has the first ${plural(common_tokens, "token")} of @${version}.</p>`}
      <div class="chosen">
        <${Chosen} stretch=${chosen} number=${at + 1} of=${stretches.length} />
        ${revealed && html`<${Text} reference=${reference} stretch=${chosen} />`}
      </div>
      ${blocks_left_out > 0 && html`<p class="small">${plural(blocks_left_out, "further block")} left out.</p>`}`}
  <//>`;
}

function Strip({ stretches, byRole, at, onAt }) {
  const total = stretches.at(-1).end;
  const chosen = stretches[at];
  const press = (event) => onAt(moved(event, at, stretches.length, { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10 }));
  const point = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const token = ((event.clientX - box.left) / box.width) * total;
    const found = stretches.findIndex((stretch) => token < stretch.end);
    if (found >= 0) onAt(found);
  };
  let start = 0;
  return html`<div class="strip" role="slider" tabindex="0" aria-label="Block of the ribbon" aria-valuemin="1" aria-valuemax=${stretches.length}
    aria-valuenow=${at + 1} aria-valuetext=${`tokens ${chosen.start} to ${chosen.end}, ${PLACES[chosen.place]}`} onKeyDown=${press} onPointerMove=${point} onPointerDown=${point}>
    <svg viewBox=${`0 0 ${total} ${TALL}`} preserveAspectRatio="none" aria-hidden="true">
      ${stretches.map((stretch) => {
        start = stretch.start;
        return piecesOf(stretch, byRole).map(([tokens, kind]) => html`<rect class=${kind} x=${start} y="6" width=${((start += tokens), tokens)} height=${TALL - 12} />`);
      })}
      ${stretches.map((stretch) => html`<line x1=${stretch.end} x2=${stretch.end} y1="6" y2=${TALL - 6} />`)}
      <rect class="frame" x=${chosen.start} y="2" width=${chosen.end - chosen.start} height=${TALL - 4} />
    </svg>
    <div class="scale" aria-hidden="true"><span>0</span><span>${count(total)} tokens</span></div>
  </div>`;
}

// What the colors stand for, with sums. By place a stretch is one piece, whose bytes are known.
function Colors({ stretches, byRole }) {
  const sums = new Map();
  for (const stretch of stretches) {
    for (const [tokens, kind, name] of piecesOf(stretch, byRole)) {
      const before = sums.get(name) ?? { tokens: 0, bytes: 0 };
      sums.set(name, { kind, tokens: before.tokens + tokens, bytes: before.bytes + (byRole ? 0 : (stretch.block?.stored_bytes ?? 0)) });
    }
  }
  return html`<${Legend} parts=${[...sums].map(([name, each]) => [each.kind, name, `${plural(each.tokens, "token")}${each.bytes ? `, ${bytes(each.bytes)}` : ""}`])} />`;
}

function Chosen({ stretch, number, of }) {
  const { start, end, place, block } = stretch;
  const whole = block ? block.start + block.tokens : end;
  const where = [["part", `${number} of ${of}`], ["tokens", `${count(start)} to ${count(end)}${end < whole ? `, of a block to ${count(whole)}` : ""}`]];
  if (!block) return html`<${Facts} facts=${[...where, ["kept", PLACES[place]]]} />`;
  const others = block.sessions_needing - 1;
  return html`<${Facts} facts=${[
    ...where,
    ["holds", Object.entries(block.holds).map(([role, tokens]) => `${roleOf(role)} ${count(tokens)}`).join(", ")],
    ["raw", bytes(block.logical_bytes)],
    ["on disk", block.stored_bytes === undefined ? null : `${bytes(block.stored_bytes)}${block.codec === "planes" ? ", compressed" : ""}`],
    ["kept", { damaged: block.condition, stripped: "stripped", lossy: `in ${block.lossy_bits} bits` }[place] ?? "exact"],
    ["shared with", block.sessions_needing === undefined ? null : others ? `${plural(others, "other session")}, ${plural(block.versions_needing, "version")} in all` : "no other session"],
    ["in memory", block.resident === null ? "" : block.resident ? "yes" : "no"],
    ["read back", block.read_ns && html`<${Time} ns=${block.read_ns} />`],
    ["who needs it", html`<code>torpor who ${shortId(block.block_id)}</code>`],
  ]} />`;
}

// The text of a stretch: it is asked for once it is to be seen, and not before.
function Text({ reference, stretch }) {
  const { value, error } = useAsked(routeOf(reference, `/contents?start=${stretch.start}&end=${stretch.end}`));
  if (error) return html`<p class="failure" role="status">${error.message}</p>`;
  if (!value) return html`<p class="small">reading …</p>`;
  if (value.no_text) return html`<p class="empty">${value.no_text}</p>`;
  return html`<div class="texts">
    ${value.passages.map((passage) => html`<div><span class="small"><i class=${colorOf(passage.role)}></i>${roleOf(passage.role)}, from token ${count(passage.start)}</span>
      <pre dir="auto" tabindex="0">${plainText(passage.text ?? "")}</pre></div>`)}
  </div>`;
}
