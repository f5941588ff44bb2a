// The page: who is signed in, and which view the address names.

import { html, render, useEffect, useErrorBoundary, useState } from "./preact.js";
import { isFile, isSignedIn, kept, namespace, onSignedOut, signInByLink, signOut } from "./asking.js";
import { History } from "./history.js";
import { Live } from "./live.js";
import { Overview } from "./overview.js";
import { Time } from "./parts.js";
import { Session } from "./session.js";
import { Sharing } from "./sharing.js";
import { Why } from "./why.js";
import { plain } from "./words.js";

// Each: its name, the beginning of its address, what draws it.
const VIEWS = [
  ["Overview", "#/", Overview],
  ["", "#/session/", Session],
  ["History", "#/history", History],
  ["Sharing", "#/sharing", Sharing],
  ["Why", "#/why", Why],
  ...(isFile ? [] : [["Live", "#/live", Live]]),
];

const viewOf = (hash) => VIEWS.findLast(([, begin]) => hash.startsWith(begin)) ?? VIEWS[0];

function Fault({ children }) {
  const [error] = useErrorBoundary();
  if (!error) return children;
  return html`<div class="door"><h1>This view failed</h1><p>${String(error.message ?? error)}</p>
    <p>Commands tell the same: <code>torpor ls</code>, <code>du</code>, <code>show</code>.</p>
    <button onClick=${() => location.reload()}>Load the page again</button></div>`;
}

function Shown({ hash }) {
  const [, begin, View] = viewOf(hash);
  return html`<${View} name=${decodeURIComponent(hash.slice(begin.length).replace(/^\//, ""))} />`;
}

function Page({ hash }) {
  const [, current] = viewOf(hash);
  return html`<header class="top">
      <a class="skip" href=${hash || "#/"} onClick=${(event) => (event.preventDefault(), document.querySelector("main").focus())}>To the figures</a>
      <a class="brand" href="#/"><img src="/inspector/icon.svg" alt="" width="22" height="22" />Torpor</a>
      <nav aria-label="Views">${VIEWS.map(([name, href]) => name && html`<a href=${href} aria-current=${href === current ? "page" : null}>${name}</a>`)}</nav>
      ${isFile
        ? html`<span class="who">written <${Time} ns=${kept.written_ns} /></span>`
        : html`<span class="who">${plain(namespace())}</span><button class="link" onClick=${() => signOut("")}>Sign out</button>`}
    </header>
    <main tabindex="-1">${isFile && html`<p class="small wide">${kept.left_out.join(" ")}</p>`}<${Fault} key=${hash}><${Shown} hash=${hash} /><//></main>`;
}

function SignedOut({ why }) {
  return html`<main class="door">
    <img src="/inspector/icon.svg" alt="" width="48" height="48" />
    <h1>Torpor inspector</h1>
    ${why && html`<p class="failure" role="status">${why}</p>`}
    <p>This page shows what the memory of your agents holds. To sign in, run</p>
    <p><code>torpor inspect</code></p>
    <p class="small">It opens this page with a link that is good once.</p>
  </main>`;
}

function App({ why }) {
  const [out, setOut] = useState({ is: !isSignedIn(), why });
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    onSignedOut((reason) => setOut({ is: true, why: reason }));
    const go = () => (location.hash.startsWith("#sign-in=") ? location.reload() : setHash(location.hash));
    window.addEventListener("hashchange", go);
    return () => window.removeEventListener("hashchange", go);
  }, []);
  return out.is ? html`<${SignedOut} why=${out.why} />` : html`<${Page} hash=${hash} />`;
}

let problem = "";
try {
  await signInByLink();
} catch (error) {
  problem = error.message;
}
render(html`<${App} why=${problem} />`, document.getElementById("page"));
