// What happens now: the daemon's events as they come. It asks for none while nobody can see it.

import { html, useEffect, useRef, useState } from "./preact.js";
import { follow, useAsked } from "./asking.js";
import { Facts, Panel, Table } from "./parts.js";
import { bytes, count, hrefOf, nameOf, plain, plural, seconds, wordOf } from "./words.js";

const KEPT = 300;
const OFTEN_S = 3;
const DRAW_MS = 250;
const WAIT_MS = 2000;
// Steps, of which the end is told.
const QUIET = /^subscribed$|began|progress|accepted|finished|verified|granted|planned|written|read$/;

function useEvents() {
  const [shown, setShown] = useState({ events: [] });
  const held = useRef({ events: [], after: "" });
  useEffect(() => {
    let leaving = null;
    let ended = false;
    let runs = false; // or waits to try again
    const run = async () => {
      if (runs) return;
      runs = true;
      while (!ended && !document.hidden) {
        leaving = new AbortController();
        let lost = "The connection is lost.";
        try {
          setShown((before) => ({ ...before, lost: "" }));
          await follow("/v1/events", { after: held.current.after, signal: leaving.signal }, (event, id) => {
            held.current.after = id ?? held.current.after;
            if (!event || QUIET.test(event.name)) return;
            held.current.events = [event, ...held.current.events].slice(0, KEPT);
          });
        } catch (error) {
          if (error.name === "AbortError") continue;
          if (error.status) lost = error.message;
        }
        setShown((before) => ({ ...before, lost }));
        await new Promise((resolve) => setTimeout(resolve, WAIT_MS));
      }
      runs = false;
    };
    const look = () => (document.hidden ? leaving?.abort() : run());
    const draw = (before) => (before.events === held.current.events ? before : { ...before, events: held.current.events });
    const drawing = setInterval(() => document.hidden || setShown(draw), DRAW_MS);
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

const shown = (name, value) => (/bytes/.test(name) ? bytes(value) : /seconds/.test(name) ? seconds(value) : typeof value === "number" ? count(value) : plain(value));
const told = (facts) => Object.entries(facts).filter(([, value]) => value).map(([name, value]) => `${wordOf(name)} ${shown(name, value)}`).join(" · ");

const isBad = (name) => /failed|refused|damage|lost/.test(name);

const COLUMNS = [
  { name: "When", size: "9ch", of: ({ time_ns }) => new Date(time_ns / 1e6).toLocaleTimeString("en-GB") },
  { name: "Event", size: "18ch", of: ({ name }) => html`<b class=${isBad(name) ? "bad" : ""}>${wordOf(name)}</b>` },
  { name: "Session", size: "minmax(8ch, 24ch)", of: ({ session }) => session && html`<a href=${hrefOf(session)} tabindex="-1">${nameOf(session)}</a>` },
  { name: "What", size: "minmax(16ch, 1fr)", from: 640, of: ({ facts }) => html`<span title=${told(facts)}>${told(facts)}</span>` },
];

export function Live() {
  const { events, lost } = useEvents();
  const minute = useAsked("/v1/why?since=1min", OFTEN_S);
  return html`<h1>Live</h1>
    <${Panel} wide title="The last minute" asked=${minute} command="torpor why --all --since 1min" note=${({ total }) => plural(total.requests, "request")}>
      ${({ total }) => html`<${Facts} facts=${[
        ["tokens written", `${count(total.written_tokens)}${total.write_seconds ? `, ${(total.written_tokens / total.write_seconds).toFixed(1)} a second` : ""}`],
        ["tokens read", count(total.read_tokens)],
        ["read again", count(total.read_again_tokens)],
        ["reused", count(total.reused_tokens)],
        ["failed", count(total.failed)],
      ]} />`}
    <//>
    <${Panel} wide title="Events" asked=${{ path: "/v1/events", value: events }} command="torpor events" note=${lost ? `${lost} Trying again.` : "following"} empty=${events.length === 0 && "Nothing has happened since you came here."}>
      <${Table} label="Events" columns=${COLUMNS} rows=${events} keyOf=${(event) => event.number} onOpen=${({ session }) => session && (location.hash = hrefOf(session))} />
    <//>`;
}
