// What happens now: the daemon's events as they come. It asks for none while nobody can see it.

import { html, useEffect, useRef, useState } from "./preact.js";
import { headers } from "./asking.js";
import { Empty, Panel } from "./parts.js";
import { bytes, count, hrefOf, nameOf, plain, seconds } from "./words.js";

const KEPT = 300;
const MINUTE_MS = 60000;
const DRAW_MS = 250;
const WAIT_MS = 2000;
const NAMES = [
  ...["sleep_ended", "sleep_failed", "wake_ended", "wake_failed", "prefill_ended", "decode_ended", "first_token", "prefix_hit"],
  ...["request_failed", "request_queued", "session_created", "session_forked", "session_folded", "session_deleted", "session_rewound"],
  ...["memory_awaited", "memory_refused", "eviction_planned", "eviction_refused", "model_loaded", "model_unloaded", "model_load_failed"],
  ...["damage_found", "session_healed", "heal_failed", "ledger_kept", "versions_pruned", "versions_stripped", "store_repaired", "lost"],
];
const QUERY = NAMES.map((name) => `names=${name}`).join("&");

// Reads events until the stream ends: tell(event, id). Throws where none can be had.
async function follow(after, signal, tell) {
  const answer = await fetch(`/v1/events?${QUERY}`, { signal, cache: "no-store", headers: { ...headers(), ...(after ? { "last-event-id": after } : {}) } });
  if (!answer.ok) throw new Error(`The daemon answered with status ${answer.status}.`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const field = (name) => part.split("\n").find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      tell(field("data") ? JSON.parse(field("data")) : null, field("id"));
    }
  }
}

function useEvents() {
  const [shown, setShown] = useState({ events: [], state: "connecting" });
  const held = useRef({ events: [], after: "", dirty: false });
  useEffect(() => {
    let leaving = null;
    let ended = false;
    const run = async () => {
      while (!ended && !document.hidden) {
        leaving = new AbortController();
        try {
          setShown((before) => ({ ...before, state: "live" }));
          await follow(held.current.after, leaving.signal, (event, id) => {
            held.current.after = id ?? held.current.after;
            if (!event || event.name === "subscribed") return;
            held.current.events = [event, ...held.current.events].slice(0, KEPT);
            held.current.dirty = true;
          });
        } catch (error) {
          if (error.name === "AbortError") return;
        }
        setShown((before) => ({ ...before, state: "lost" }));
        await new Promise((resolve) => setTimeout(resolve, WAIT_MS));
      }
    };
    const look = () => (document.hidden ? leaving?.abort() : run());
    const drawing = setInterval(() => {
      if (!held.current.dirty || document.hidden) return;
      held.current.dirty = false;
      setShown((before) => ({ ...before, events: held.current.events }));
    }, DRAW_MS);
    document.addEventListener("visibilitychange", look);
    run();
    return () => {
      ended = true;
      leaving?.abort();
      clearInterval(drawing);
      document.removeEventListener("visibilitychange", look);
    };
  }, []);
  return shown;
}

const SIZES = ["bytes_written", "bytes_read", "bytes_freed", "wanted_bytes", "weights_bytes"];
const COUNTS = [["tokens", "tokens"], ["cached_tokens", "taken over"], ["tokens_prefilled", "computed"], ["ahead", "ahead"], ["count", "lost"]];
const WORDS = ["cause", "code", "canary", "verb", "source", "model"];

function told(facts) {
  const words = WORDS.filter((name) => typeof facts[name] === "string").map((name) => plain(facts[name]).replace("torpor://", "").replaceAll("_", " "));
  const counts = COUNTS.filter(([name]) => facts[name] > 0).map(([name, word]) => `${count(facts[name])} ${word}`);
  const sizes = SIZES.filter((name) => facts[name] > 0).map((name) => bytes(facts[name]));
  return [...words, ...counts, ...sizes, ...(facts.seconds ? [seconds(facts.seconds)] : [])].join(" · ");
}

const isBad = (name) => /failed|refused|damage|lost/.test(name);

export function Live() {
  const { events, state } = useEvents();
  const [stopped, setStopped] = useState(null);
  const list = stopped ?? events;
  const recent = events.filter((event) => Date.now() - event.time_ns / 1e6 < MINUTE_MS);
  const sum = (name, fact) => recent.filter((event) => event.name === name).reduce((total, event) => total + (event.facts[fact] ?? 0), 0);
  const number = (name) => recent.filter((event) => event.name === name).length;
  const written = sum("decode_ended", "seconds");
  return html`<h1>Live</h1>
    <${Panel} wide title="The last minute" command="torpor top" note=${{ live: "following", lost: "The connection is lost; trying again.", connecting: "connecting" }[state]}>
      <dl class="figures">
        ${[
          ["tokens written", count(sum("decode_ended", "tokens"))],
          ["tokens a second, a session", written ? (sum("decode_ended", "tokens") / written).toFixed(1) : "–"],
          ["tokens read", count(sum("prefill_ended", "tokens"))],
          ["taken over", count(sum("prefix_hit", "cached_tokens"))],
          ["sleeps", count(number("sleep_ended"))],
          ["wakes", count(number("wake_ended"))],
          ["refused", count(number("request_failed"))],
        ].map(([name, value]) => html`<div><dd>${value}</dd><dt>${name}</dt></div>`)}
      </dl>
    <//>
    <${Panel} wide title="Events" command="torpor events" note="no text is in them">
      <div class="tools"><button aria-pressed=${stopped ? "true" : "false"} onClick=${() => setStopped(stopped ? null : events)}>${stopped ? "Go on" : "Hold still"}</button>
        ${stopped && events[0] !== stopped[0] && html`<span class="small">newer ones wait</span>`}</div>
      ${list.length === 0
        ? html`<${Empty}>Nothing has happened since you came here. A chat, a sleep or a wake appears at once.<//>`
        : html`<ol class="events" tabindex="0" aria-label="Events, the newest first">${list.map((event) => html`<li key=${event.number} class=${isBad(event.name) ? "bad" : ""}>
            <time datetime=${new Date(event.time_ns / 1e6).toISOString()}>${new Date(event.time_ns / 1e6).toLocaleTimeString("en-GB")}</time>
            <b>${plain(event.name).replaceAll("_", " ")}</b>
            <span>${event.session ? html`<a href=${hrefOf(event.session)}>${nameOf(event.session)}</a>` : ""}</span>
            <span class="small">${told(event.facts)}</span></li>`)}</ol>`}
    <//>`;
}
