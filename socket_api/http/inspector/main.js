// The page: who is signed in, and which view the address names.

import { Component, html, render, useEffect, useState } from "./preact.js";
import { isSignedIn, namespace, onSignedOut, signInByLink, signOut } from "./asking.js";
import { History } from "./history.js";
import { Live } from "./live.js";
import { Overview } from "./overview.js";
import { Session } from "./session.js";
import { Sharing } from "./sharing.js";
import { Why } from "./why.js";
import { plain } from "./words.js";

const VIEWS = [["Overview", "#/"], ["History", "#/history"], ["Sharing", "#/sharing"], ["Why", "#/why"], ["Live", "#/live"]];

function viewOf(hash) {
  const session = /^#\/session\/(.+)$/.exec(hash)?.[1];
  if (session) {
    const name = decodeURIComponent(session);
    return ["", html`<${Session} key=${name} name=${name} />`];
  }
  const history = /^#\/history(?:\/(.+))?$/.exec(hash);
  if (history) return ["#/history", html`<${History} session=${history[1] ? decodeURIComponent(history[1]) : ""} />`];
  if (hash === "#/sharing") return ["#/sharing", html`<${Sharing} />`];
  if (hash === "#/why") return ["#/why", html`<${Why} />`];
  if (hash === "#/live") return ["#/live", html`<${Live} />`];
  return ["#/", html`<${Overview} />`];
}

class Fault extends Component {
  constructor() {
    super();
    this.state = { error: null };
  }

  static getDerivedStateFromError(error) {
    return { error };
  }

  render({ children }, { error }) {
    if (error === null) return children;
    return html`<div class="door"><h1>This view failed</h1><p>${String(error.message ?? error)}</p>
      <p>The figures are told by commands, too: <code>torpor ls</code>, <code>du</code>, <code>show</code>.</p>
      <button onClick=${() => location.reload()}>Load the page again</button></div>`;
  }
}

function Page() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const tell = () => setHash(location.hash);
    window.addEventListener("hashchange", tell);
    return () => window.removeEventListener("hashchange", tell);
  }, []);
  const [current, view] = viewOf(hash);
  return html`<header class="top">
      <a class="skip" href=${hash || "#/"} onClick=${(event) => (event.preventDefault(), document.querySelector("main").focus())}>To the figures</a>
      <a class="brand" href="#/"><img src="/inspector/icon.svg" alt="" width="22" height="22" />Torpor</a>
      <nav aria-label="Views">${VIEWS.map(([name, href]) => html`<a href=${href} aria-current=${href === current ? "page" : null}>${name}</a>`)}</nav>
      <span class="who">${plain(namespace())}</span>
      <button class="link" onClick=${() => signOut("")}>Sign out</button>
    </header>
    <main tabindex="-1"><${Fault} key=${hash}>${view}<//></main>`;
}

function SignedOut({ why }) {
  return html`<main class="door">
    <img src="/inspector/icon.svg" alt="" width="48" height="48" />
    <h1>Torpor inspector</h1>
    ${why && html`<p class="failure" role="status">${why}</p>`}
    <p>This page shows what the memory of your agents holds. To sign in, run</p>
    <p><code>torpor inspect</code></p>
    <p class="small">It opens this page with a link that is good once. The token stays in this tab, and in no address.</p>
  </main>`;
}

function App({ why }) {
  const [out, setOut] = useState({ is: !isSignedIn(), why });
  useEffect(() => onSignedOut((reason) => setOut({ is: true, why: reason })), []);
  useEffect(() => {
    const signIn = () => location.hash.startsWith("#sign-in=") && location.reload();
    window.addEventListener("hashchange", signIn);
    return () => window.removeEventListener("hashchange", signIn);
  }, []);
  return out.is ? html`<${SignedOut} why=${out.why} />` : html`<${Page} />`;
}

let problem = "";
try {
  await signInByLink();
} catch (error) {
  problem = error.message;
}
render(html`<${App} why=${problem} />`, document.getElementById("page"));
