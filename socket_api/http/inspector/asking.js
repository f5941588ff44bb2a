// Asks the daemon, with a token that stays in the session storage of this tab. A file of `torpor inspect --html` has the
// answers in it instead, and asks nobody.

import { useEffect, useState } from "./preact.js";
import { plain } from "./words.js";

const TOKEN = "torpor-token";
const NAMESPACE = "torpor-namespace";
const RETRY_MS = 5000;
const PAUSE = 20; // times as long as the answer took, at least

// An error with the status of the answer; 0: none came.
const refusal = (message, status) => Object.assign(new Error(plain(message)), { status });

// What a file has: { written_ns, with_text, left_out, answers: path -> answer }; null on a daemon's page.
export const kept = JSON.parse(document.getElementById("kept")?.textContent ?? "null");
export const isFile = kept !== null;

export const isSignedIn = () => isFile || sessionStorage.getItem(TOKEN) !== null;
export const namespace = () => sessionStorage.getItem(NAMESPACE) ?? "";
// Who is told of all namespaces.
export const isOwner = () => (isFile ? known("/v1/usage") !== null : namespace() === "default");
// A path that is asked for; null where a file does not have it.
export const known = (path) => (!isFile || Object.hasOwn(kept.answers, path) ? path : null);

let tellSignedOut = () => {};
export const onSignedOut = (tell) => (tellSignedOut = tell);

export function signOut(why = "") {
  sessionStorage.clear();
  tellSignedOut(why);
}

// Gives the code of the address for a token.
export async function signInByLink() {
  const code = /^#sign-in=([\w-]+)$/.exec(location.hash)?.[1];
  if (code === undefined) return;
  history.replaceState(null, "", "/");
  const told = await ask("/inspector/token", { body: { code } });
  sessionStorage.setItem(TOKEN, told.token);
  sessionStorage.setItem(NAMESPACE, told.namespace);
}

// Asks for a path. Throws a refusal, or AbortError.
async function reach(path, { body, signal, headers = {} }) {
  if (isSignedIn()) headers.authorization = `Bearer ${sessionStorage.getItem(TOKEN)}`;
  let answer;
  try {
    answer = await fetch(path, { ...(body && { method: "POST", body: JSON.stringify(body) }), signal, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : refusal("The daemon does not answer.", 0);
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  if (answer.status === 401 && isSignedIn()) signOut("The token of this tab is not known any more.");
  throw refusal(told?.error?.message ?? `The daemon answered with status ${answer.status}.`, answer.status);
}

// The answer of a route. Throws as `reach`.
export async function ask(path, given = {}) {
  if (!isFile) return (await reach(path, given)).json();
  const told = known(path) && kept.answers[path];
  if (told && !told.refused) return told;
  throw told ? refusal(told.refused, 500) : refusal("This file does not have it; the command below prints it.", 404);
}

// Tells each event of a stream until it ends: tell(event, id). after: the id of the last one before. Throws as `reach`.
export async function follow(path, { signal, after }, tell) {
  const answer = await reach(path, { signal, headers: { accept: "text/event-stream", ...(after && { "last-event-id": after }) } });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const field = (name) => part.split("\n").find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      tell(JSON.parse(field("data") ?? "null"), field("id"));
    }
  }
}

// What a route tells, asked again every so many seconds while the page can be seen: { path, value, error, again }. What
// was told stays when a later answer fails. path null: nothing is asked.
export function useAsked(path, everyS = 0) {
  const [told, setTold] = useState({});
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (path === null) return;
    const leaving = new AbortController();
    let timer = 0;
    const look = async () => {
      if (document.hidden) return;
      clearTimeout(timer);
      const began = performance.now();
      let pauseMs = 1000 * everyS;
      try {
        const value = await ask(path, { signal: leaving.signal });
        setTold({ path, value });
        pauseMs &&= Math.max(pauseMs, PAUSE * (performance.now() - began));
      } catch (error) {
        if (error.name === "AbortError") return;
        pauseMs = Math.max(pauseMs, RETRY_MS);
        setTold((before) => ({ path, value: before.path === path ? before.value : undefined, error }));
      }
      if (pauseMs && !isFile) timer = setTimeout(look, pauseMs);
    };
    look();
    document.addEventListener("visibilitychange", look);
    return () => {
      leaving.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", look);
    };
  }, [path, everyS, turn]);
  const { value, error } = told.path === path ? told : {};
  return { path, value, error, again: () => setTurn(turn + 1) };
}
