// Asks the daemon, with the token of this tab. The token stays in this tab's session storage and in no address.

import { useCallback, useEffect, useRef, useState } from "./preact.js";

const TOKEN = "torpor-token";
const NAMESPACE = "torpor-namespace";
const SLOWEST_MS = 30000;

export class Refused extends Error {
  // status 0: no answer came.
  constructor(message, status, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const isSignedIn = () => sessionStorage.getItem(TOKEN) !== null;
export const namespace = () => sessionStorage.getItem(NAMESPACE) ?? "";
// Figures of the whole store and of all memory are for the owner of the daemon.
export const isOwner = () => namespace() === "default";

let tellSignedOut = () => {};
export const onSignedOut = (tell) => (tellSignedOut = tell);

export function signOut(why = "") {
  sessionStorage.clear();
  tellSignedOut(why);
}

// Takes the code out of the address at once, and gives it for the token.
export async function signInByLink() {
  const code = /^#sign-in=([\w-]+)$/.exec(location.hash)?.[1];
  if (code === undefined) return;
  history.replaceState(null, "", "/");
  const told = await ask("/inspector/token", { body: { code } });
  sessionStorage.setItem(TOKEN, told.token);
  sessionStorage.setItem(NAMESPACE, told.namespace);
}

export const headers = () => ({ authorization: `Bearer ${sessionStorage.getItem(TOKEN)}` });

// The answer of a route. Throws Refused, or AbortError.
export async function ask(path, { method, body, signal } = {}) {
  const given = { method: method ?? (body ? "POST" : "GET"), signal, cache: "no-store", headers: isSignedIn() ? headers() : {} };
  if (body) given.body = JSON.stringify(body);
  let answer, told;
  try {
    answer = await fetch(path, given);
    told = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The daemon does not answer.", 0);
  }
  if (answer.ok) return told;
  const error = told?.error ?? {};
  const refusal = new Refused(String(error.message ?? `The daemon answered with status ${answer.status}.`), answer.status, error.code);
  if (answer.status === 401 && isSignedIn()) signOut("The token of this tab is not known any more.");
  throw refusal;
}

// What a route tells, asked again every so many seconds while the page can be seen: { value, error, again }. What was
// told stays when a later answer fails. path null: nothing is asked.
export function useAsked(path, everyS = 0) {
  const [told, setTold] = useState({ path, value: undefined, error: null });
  const [turn, setTurn] = useState(0);
  const failures = useRef(0);
  useEffect(() => {
    if (path === null) return;
    const leaving = new AbortController();
    let timer = 0;
    const look = async () => {
      if (document.hidden && everyS) return;
      clearTimeout(timer);
      try {
        const value = await ask(path, { signal: leaving.signal });
        failures.current = 0;
        setTold({ path, value, error: null });
      } catch (error) {
        if (error.name === "AbortError") return;
        failures.current += 1;
        setTold((before) => ({ path, value: before.path === path ? before.value : undefined, error }));
      }
      const lost = failures.current ? Math.min(1000 * 2 ** failures.current, SLOWEST_MS) : 0;
      if (everyS || lost) timer = setTimeout(look, Math.max(everyS * 1000, lost));
    };
    look();
    document.addEventListener("visibilitychange", look);
    return () => {
      leaving.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", look);
    };
  }, [path, everyS, turn]);
  const again = useCallback(() => setTurn((before) => before + 1), []);
  const current = told.path === path ? told : { value: undefined, error: null };
  return { path, value: current.value, error: current.error, again };
}
